// Stands in for operators that are not written yet: a weak definition, replaced by the operator's own as soon as its
// file exists.
#include "core/operators/factories.h"
#include "core/status.h"

namespace lowbit {

#define LOWBIT_PENDING(factory)                               \
  __attribute__((weak)) LOWBIT_OPERATOR_FACTORY(factory) {    \
    (void)attributes, (void)constants, (void)present, (void)options; \
    Fail(schema.name, ": not implemented");                  \
  }

LOWBIT_PENDING(CreateAffine)
LOWBIT_PENDING(CreateLookup)
LOWBIT_PENDING(CreateAdd)
LOWBIT_PENDING(CreateMul)
LOWBIT_PENDING(CreateMaxPool)
LOWBIT_PENDING(CreateAveragePool)
LOWBIT_PENDING(CreateGlobalAveragePool)
LOWBIT_PENDING(CreateConcat)
LOWBIT_PENDING(CreateResize)
LOWBIT_PENDING(CreateRequantize)
LOWBIT_PENDING(CreateQuantize)
LOWBIT_PENDING(CreateDequantize)

}  // namespace lowbit
