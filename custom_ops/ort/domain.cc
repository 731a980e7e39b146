#include "ort/domain.h"

#include <deque>

#include "core/schema.h"
#include "ort/custom_op.h"

namespace lowbit::ort {
namespace {

OrtCustomOpDomain* BuildDomain() {
  static auto& ops = *new std::deque<CustomOp>;  // the domain points into it and is never released either
  OrtCustomOpDomain* domain = nullptr;
  Check(Api().CreateCustomOpDomain(kDomain, &domain));
  for (const OpSchema& schema : OpSchemas())
    Check(Api().CustomOpDomain_Add(domain, &ops.emplace_back(schema)));
  return domain;
}

}  // namespace

OrtCustomOpDomain* Domain() {
  static OrtCustomOpDomain* const domain = BuildDomain();
  return domain;
}

}  // namespace lowbit::ort
