// Vectors live in registers only as long as everything between a load and a store is inlined, and compilers
// give up on large lambdas. Written behind the parameter list of a lambda, or before `inline` in a function's
// declaration.
#pragma once

#ifdef _MSC_VER
#define LOWBIT_ALWAYS_INLINE [[msvc::forceinline]]
#else
#define LOWBIT_ALWAYS_INLINE __attribute__((always_inline))
#endif
