#include "ort/domain.h"

#include <deque>
#include <memory>

#include "core/schema.h"
#include "ort/custom_op.h"

namespace lowbit::ort {
namespace {

OrtCustomOpDomain* BuildDomain() {
  auto ops = std::make_unique<std::deque<CustomOp>>();
  OrtCustomOpDomain* made = nullptr;
  Check(Api().CreateCustomOpDomain(kDomain, &made));
  Owned<OrtCustomOpDomain> domain(made);
  for (const OpSchema& schema : OpSchemas())
    Check(Api().CustomOpDomain_Add(made, &ops->emplace_back(schema)));
  static_cast<void>(ops.release());  // the domain points into it and is never released either
  return domain.release();
}

}  // namespace

OrtCustomOpDomain* Domain() {
  static OrtCustomOpDomain* const domain = BuildDomain();
  return domain;
}

}  // namespace lowbit::ort
