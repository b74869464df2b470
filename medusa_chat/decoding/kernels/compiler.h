/* What GCC and Clang have beside C, and every file here uses. */

#pragma once

#define EXPORT __attribute__((visibility("default")))
#define INLINE static inline __attribute__((always_inline))

INLINE int least(int a, int b) { return a < b ? a : b; }
