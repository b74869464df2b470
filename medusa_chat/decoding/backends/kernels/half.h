/* bf16: the upper half of a float. Two of them, one behind the other, take a float's place. */

#pragma once

#include <stdint.h>

#include "vectors.h"

typedef uint32_t words __attribute__((vector_size(32)));
typedef uint16_t halves __attribute__((vector_size(16), aligned(2), may_alias));

/* To the nearest, ties to even; what is no number stays none. */
INLINE halves narrow(vec x) {
#if defined(__AVX512BF16__) && defined(__AVX512VL__)
    halves rounded;
    __asm__("vcvtneps2bf16 %1, %0" : "=v"(rounded) : "v"(x));
    return rounded;
#else
    const words bits = (words)x, odd = (bits >> 16) & 1;
    const words near = (bits + 0x7fff + odd) >> 16, none = (bits >> 16) | 64;
    return __builtin_convertvector(((words)(x == x) & near) | ((words)(x != x) & none), halves);
#endif
}

INLINE vec widen(halves x) {
#if defined(__AVX2__)
    words wide; /* what GCC 12 makes of the other way takes four times as many */
    __asm__("vpmovzxwd %1, %0" : "=x"(wide) : "xm"(x));
    return (vec)(wide << 16);
#else
    return (vec)(__builtin_convertvector(x, words) << 16);
#endif
}

/* Lane by lane a[0] * b[0] + a[1] * b[1] + sums of two of bf16 each, summed in fp32. */
INLINE wide paired_wide(wide a, wide b, wide sums) {
#if defined(__AVX512BF16__) && defined(__AVX512VL__)
    __asm__("vdpbf16ps %2, %1, %0" : "+v"(sums) : "v"(a), "v"(b));
    return sums;
#else
    sums = fused_wide((wide)((wide_ints)a << 16), (wide)((wide_ints)b << 16), sums);
    return fused_wide((wide)((wide_ints)a & ~0xffff), (wide)((wide_ints)b & ~0xffff), sums);
#endif
}

INLINE float widen_one(uint16_t x) {
    const union {
        uint32_t bits;
        float number;
    } found = {(uint32_t)x << 16};
    return found.number;
}

/* y may not lie in x. */
INLINE void narrow_all(const float *x, uint16_t *y, int size) {
    int d = 0;
    for (; d + LANES <= size; d += LANES) *(halves *)(y + d) = narrow(load(x + d));
    for (; d < size; d++) y[d] = narrow(all(x[d]))[0];
}
