#pragma once

#include <memory>

#include "core/provider_options.h"
#include "ep/region/backend.h"
#include "ep/tests/fake_device/fake_memory.h"

namespace lowbit::ep::fake {

// The CPU's back end on the device's memory and streams.
std::shared_ptr<Backend> CreateFakeBackend(std::shared_ptr<Memory> memory, const EpOptions& options);

}  // namespace lowbit::ep::fake
