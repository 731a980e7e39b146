#pragma once

#include "ort/ort_api.h"

namespace lowbit::ort {

// The ops of ai.lowbit. Shared by every session and never released: sessions keep pointers into it and may
// live until the process ends. Throws Error.
OrtCustomOpDomain* Domain();

}  // namespace lowbit::ort
