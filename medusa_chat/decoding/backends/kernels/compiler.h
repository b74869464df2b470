/* What GCC and Clang have beside C, and every file here uses. */

#pragma once

/* For others to call, and what is called by its name in here is ours: libc has a `step` too. */
#define EXPORT __attribute__((visibility("protected")))
#define INLINE static inline __attribute__((always_inline))

INLINE int least(int a, int b) { return a < b ? a : b; }
