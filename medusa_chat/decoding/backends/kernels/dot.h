/* Lane by lane, words of four bytes each: sums + w[0] * x[0] + ... + w[3] * x[3] of whole numbers, exact.

   x has signs and is never -128. w is from 0 on, of few bits, or of 8 bits: those are signed where
   the CPU multiplies signed by signed, else 128 more (SIGN). PLAIN_DOT is portable C. */

#pragma once

#include "vectors.h"

#if !defined(PLAIN_DOT) && HAS_ZMM && defined(__AVX512VNNI__)
#define DOT_INSTRUCTION "vpdpbusd %2, %1, %0"
#define VECTOR_REGISTER "v"
#define DOT_BY "AVX-512 VNNI"
#elif !defined(PLAIN_DOT) && WIDTH == LANES && defined(__AVXVNNI__)
#define DOT_INSTRUCTION "%{vex%} vpdpbusd %2, %1, %0"
#define VECTOR_REGISTER "x"
#define DOT_BY "AVX-VNNI"
#elif !defined(PLAIN_DOT) && defined(__AVX2__) && (HAS_ZMM || WIDTH == LANES)
#define HAS_PAIRS 1
#define DOT_BY "vpmaddubsw"
#elif !defined(PLAIN_DOT) && defined(__ARM_FEATURE_DOTPROD)
#include <arm_neon.h>
#define NEON_DOT 1
#define DOT_BY "sdot"
#else
#define DOT_BY PORTABLE
#endif

/* What is behind a number of 8 bits. */
#if defined(DOT_INSTRUCTION)
#define SIGN 128
#else
#define SIGN 0
#endif

INLINE wide_ints all_ints(int32_t x) { return (wide_ints){0} + x; }

#if !defined(HAS_PAIRS)
#define HAS_PAIRS 0
#endif

#if HAS_PAIRS
#if HAS_ZMM
#define ANY "v"
#else
#define ANY "x"
#endif
/* Sums of two products each, of 16 bits. */
INLINE wide_ints pairs_of(wide_ints w, wide_ints x) {
    wide_ints found;
    __asm__("vpmaddubsw %2, %1, %0" : "=" ANY(found) : ANY(w), ANY(x));
    return found;
}
INLINE wide_ints plus_pairs(wide_ints a, wide_ints b) {
    typedef int16_t pairs __attribute__((vector_size(4 * WIDTH)));
    return (wide_ints)((pairs)a + (pairs)b);
}
/* Bytes without their signs, and x with those of w. */
INLINE wide_ints sizes_of(wide_ints w) {
    wide_ints found;
    __asm__("vpabsb %1, %0" : "=" ANY(found) : ANY(w));
    return found;
}
INLINE wide_ints signed_by(wide_ints x, wide_ints w) {
#if HAS_ZMM
    typedef int8_t bytes __attribute__((vector_size(4 * WIDTH)));
    const bytes is_less = (bytes)w < 0;
    return (wide_ints)(((bytes)x ^ is_less) - is_less);
#else
    wide_ints found;
    __asm__("vpsignb %2, %1, %0" : "=x"(found) : "x"(x), "x"(w));
    return found;
#endif
}
/* w[0] * x[0] + w[1] * x[1] of 16 bits. */
INLINE wide_ints both_of(wide_ints w, wide_ints x) {
    wide_ints both;
    __asm__("vpmaddwd %2, %1, %0" : "=" ANY(both) : ANY(w), ANY "m"(x));
    return both;
}
#endif

INLINE wide_ints dot(wide_ints sums, wide_ints w, wide_ints x) {
#if defined(DOT_INSTRUCTION)
    __asm__(DOT_INSTRUCTION : "+" VECTOR_REGISTER(sums) : VECTOR_REGISTER(w), VECTOR_REGISTER(x));
    return sums;
#elif defined(NEON_DOT)
    union {
        wide_ints whole;
        int32x4_t sums[2];
        int8x16_t bytes[2];
    } s = {sums}, a = {w}, b = {x};
    s.sums[0] = vdotq_s32(s.sums[0], a.bytes[0], b.bytes[0]);
    s.sums[1] = vdotq_s32(s.sums[1], a.bytes[1], b.bytes[1]);
    return s.whole;
#else
    for (int i = 0; i < 32; i += 8) sums += (w << (24 - i) >> 24) * (x << (24 - i) >> 24);
    return sums;
#endif
}
