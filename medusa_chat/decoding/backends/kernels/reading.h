/* Numbers of packed weights, read out of a panel: in registers, or 256 inputs at a time in a chunk. */

#pragma once

#include <string.h>

#include "dot.h"
#include "half.h"
#include "packed.h"

#define AHEAD 4096 /* bytes */
#define LOW 0x0f0f0f0fu

/* 32 inputs of a vector of outputs: words of numbers, a scale of all of them, and where they have_scales
   whole numbers that it is multiplied by, and floors where there are any, one or two (of 16 inputs
   each). A weight is own * scale * (number - zero) + floor. */
typedef struct {
    wide_ints words[STEP / 4], scales[2]; /* scales: bits of floats, or twice as 16 bits (scales_pairs) */
    wide own, floors[2];
} Numbers;

/* The same of a whole panel, for some times 32 inputs. */
typedef struct {
    wide_ints words[STEPS_DEEP][STEP / 4][VECTORS], scales[STEPS_DEEP][2][VECTORS];
    wide own[STEPS_DEEP][VECTORS], floors[STEPS_DEEP][2][VECTORS];
} Chunk;

typedef uint32_t wide_words __attribute__((vector_size(4 * WIDTH)));
typedef uint32_t loose_words __attribute__((vector_size(4 * WIDTH), aligned(1), may_alias));

INLINE wide_words words_at(const char *p) { return *(const loose_words *)p; }

INLINE wide halves_at(const char *p) {
    typedef uint16_t some __attribute__((vector_size(2 * WIDTH), aligned(1), may_alias));
    const some *bits = (const some *)p;
#if defined(__F16C__) && (HAS_ZMM || WIDTH == LANES)
    wide found;
    __asm__("vcvtph2ps %1, %0" : "=v"(found) : "m"(*bits));
    return found;
#else
    const wide_words whole = __builtin_convertvector(*bits, wide_words);
    const wide size = (wide)((whole & 0x7fff) << 13) * 0x1p112f; /* of fp16, finite */
    return (wide)((wide_words)size | (whole & 0x8000) << 16);
#endif
}

INLINE wide_ints bytes_at(const char *p) {
    typedef uint8_t some __attribute__((vector_size(WIDTH), aligned(1), may_alias));
#if defined(__AVX2__) && (HAS_ZMM || WIDTH == LANES)
    wide_ints found;
    __asm__("vpmovzxbd %1, %0" : "=v"(found) : "m"(*(const some *)p));
    return found;
#else
    return __builtin_convertvector(*(const some *)p, wide_ints);
#endif
}

/* Bits from `low` on of each byte, with a sign or without. */
INLINE wide_ints counts_at(const char *p, int low, int bits, int is_signed) {
    const wide_ints at = bytes_at(p);
    if (is_signed) return at << 24 >> 24;
    return bits == 8 ? at : at >> low & ((1 << bits) - 1);
}

/* Whether a format's sums within 16 bits are multiplied by the scales of parts before they are widened,
   which is one instruction. */
INLINE int scales_pairs(const Format f) {
    return HAS_PAIRS && f.parts;
}

INLINE int has_scales(const Format f) { return f.parts == 16 || scales_pairs(f); }

/* 2^(byte - 128), as ggml has it. */
INLINE wide powers_at(const char *p) {
    const wide_ints e = bytes_at(p), is_small = e < 2;
    return (wide)((is_small & 0x00200000 << (e & 1)) | (~is_small & (e - 1) << 23));
}

static const int8_t curve[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                 1,    13,   25,  38,  53,  69,  89,  113};
static const int8_t mxfp4[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

/* Of each byte of places, 0 to 15, what stands there. */
INLINE wide_ints looked_up(const int8_t *table, wide_ints places) {
#if defined(__AVX2__) && (HAS_ZMM || WIDTH == LANES)
    typedef int8_t sixteen __attribute__((vector_size(16), aligned(1), may_alias));
    wide_ints found;
#if HAS_ZMM
    __asm__("vbroadcasti32x4 %1, %0" : "=v"(found) : "m"(*(const sixteen *)table));
#else
    __asm__("vbroadcasti128 %1, %0" : "=x"(found) : "m"(*(const sixteen *)table));
#endif
    __asm__("vpshufb %1, %0, %0" : "+v"(found) : "v"(places));
    return found;
#elif defined(__aarch64__)
    union {
        wide_ints whole;
        uint8x16_t part[2];
        int8x16_t found[2];
    } at = {places};
    for (int i = 0; i < 2; i++) at.found[i] = vqtbl1q_s8(vld1q_s8(table), at.part[i]);
    return at.whole;
#else
    int8_t each[4 * WIDTH];
    memcpy(each, &places, sizeof each);
    for (int i = 0; i < 4 * WIDTH; i++) each[i] = table[each[i] & 15];
    memcpy(&places, each, sizeof each);
    return places;
#endif
}

/* The words of 32 inputs of numbers of `bits`, of the vector of outputs at p. */
INLINE void read_words(const char *p, int bits, const int8_t *table, wide_ints *to) {
    const ptrdiff_t line = PANEL * 4;
    const int high = bits == 5 ? 4 : 2;
    const char *above = p;
    if (bits == 8)
        _Pragma("GCC unroll 8") for (int g = 0; g < 8; g++)
            to[g] = (wide_ints)(words_at(p + g * line) ^ 0x01010101u * SIGN);
    if (bits == 6)
        _Pragma("GCC unroll 2") for (int u = 0; u < 8; u += 4) {
            wide_words fourth = {0};
            _Pragma("GCC unroll 3") for (int i = 2; i >= 0; i--) {
                const wide_words w = words_at(p + (u / 4 * 3 + i) * line);
                to[u + i] = (wide_ints)(w & 0x3f3f3f3f);
                fourth = (fourth | (w & 0xc0c0c0c0)) >> 2;
            }
            to[u + 3] = (wide_ints)fourth;
        }
    if (bits == 4 || bits == 5)
        _Pragma("GCC unroll 4") for (int n = 0; n < 4; n++, above += line) {
            const wide_words w = words_at(above);
            to[2 * n] = (wide_ints)(w & LOW), to[2 * n + 1] = (wide_ints)(w >> 4 & LOW);
        }
    if (bits == 2 || bits == 3)
        _Pragma("GCC unroll 2") for (int u = 0; u < 2; u++, above += line) {
            const wide_words w = words_at(above);
            _Pragma("GCC unroll 4") for (int i = 0; i < 4; i++)
                to[4 * u + i] = (wide_ints)(w >> 2 * i & 0x03030303);
        }
    if (bits == 3 || bits == 5) {
        const wide_words w = words_at(above);
        const uint32_t mask = 0x01010101u << high;
        _Pragma("GCC unroll 8") for (int g = 0; g < 8; g++)
            to[g] |= (wide_ints)((g < high ? w << (high - g) : w >> (g - high)) & mask);
    }
    if (table)
        _Pragma("GCC unroll 8") for (int g = 0; g < 8; g++)
            to[g] = looked_up(table, to[g]) ^ (int32_t)(0x01010101u * SIGN);
}

/* Bytes of a panel that belong to a block of inputs, and those of its scales. */
INLINE int head_size(const Format f) {
    if (f.values == MXFP4) return PANEL;
    if (f.bits == 2) return (4 + f.parts) * PANEL; /* a byte has a scale and a floor of 4 bits */
    return (2 + f.parts) * (1 + f.has_floor) * PANEL;
}
INLINE int block_size(const Format f) { return head_size(f) + f.each * f.bits / 8 * PANEL; }

/* Asks for what is read a while after the `bytes` at p. */
INLINE void fetch(const char *p, int bytes) {
    _Pragma("GCC unroll 8") for (int i = 0; i < bytes; i += 64) __builtin_prefetch(p + AHEAD + i);
}

/* A block's own scale and floor of the vector v of outputs. */
typedef struct {
    wide scale, floor;
} Own;

INLINE Own own_of(const Format f, const char *block, int v) {
    const char *at = block + v * WIDTH * 2;
    if (f.values == MXFP4) return (Own){.scale = powers_at(block + v * WIDTH)};
    const Own own = {.scale = halves_at(at)};
    return f.has_floor ? (Own){own.scale, halves_at(at + 2 * PANEL)} : own;
}

/* The numbers of a block's `step`-th 32 inputs, of the vector v of outputs. f and v are constants
   where it is called. */
INLINE void read_step(const Format f, const char *block, int step, int v, Own own, Numbers *to) {
    const int8_t *table = f.values == CURVE ? curve : f.values == MXFP4 ? mxfp4 : NULL;
    const int halves = f.parts == 16 ? 2 : 1, is_both = f.bits == 2, deep = is_both ? 4 : 8;
    const char *scales = block + 2 * PANEL * (1 + f.has_floor) + v * WIDTH;
    const char *floors = scales + (is_both ? 0 : f.parts * PANEL);
    to->own = own.scale, to->floors[0] = own.floor;
    for (int h = 0; h < halves && f.parts; h++) {
        const ptrdiff_t at = (step * halves + h) * PANEL;
        const wide_ints found = counts_at(scales + at, 0, deep, !f.has_floor);
        const wide scale = __builtin_convertvector(found, wide);
        to->scales[h] = scales_pairs(f) ? (found & 0xffff) | found << 16 : (wide_ints)scale;
        if (!has_scales(f)) to->own *= scale;
        if (!f.has_floor) continue;
        const wide_ints count = counts_at(floors + at, is_both ? 4 : 0, deep, 0);
        to->floors[h] = own.floor * __builtin_convertvector(count, wide);
    }
    read_words(block + head_size(f) + step * f.bits * PANEL * 4 + v * WIDTH * 4, f.bits, table,
               to->words);
}

/* `steps` times 32 inputs of a panel from p on, whole blocks -> where the next ones are. */
INLINE const char *read_steps(const Format f, const char *p, int steps, Chunk *to) {
    const int each = f.each / STEP, halves = f.parts == 16 ? 2 : 1;
    for (int b = 0; b < steps; b += each, p += block_size(f)) {
        Own own[VECTORS];
        fetch(p, head_size(f));
        for (int v = 0; v < VECTORS; v++) own[v] = own_of(f, p, v);
        for (int s = 0; s < each; s++) {
            fetch(p + head_size(f) + s * f.bits * PANEL * 4, f.bits * PANEL * 4);
            _Pragma("GCC unroll 4") for (int v = 0; v < VECTORS; v++) {
                Numbers n;
                read_step(f, p, s, v, own[v], &n);
                _Pragma("GCC unroll 8") for (int g = 0; g < STEP / 4; g++)
                    to->words[b + s][g][v] = n.words[g];
                to->own[b + s][v] = n.own;
                for (int h = 0; h < halves; h++) {
                    if (has_scales(f)) to->scales[b + s][h][v] = n.scales[h];
                    if (f.has_floor) to->floors[b + s][h][v] = n.floors[h];
                }
            }
        }
    }
    return p;
}

/* Every type and its format, for code that has it as a constant. */
#define ALL_FORMATS(DO)                                 \
    DO(2, 4, 0, 0, 8, 32, 18, NO_TABLE)      /* Q4_0 */ \
    DO(3, 4, 0, 1, 0, 32, 20, NO_TABLE)      /* Q4_1 */ \
    DO(6, 5, 0, 0, 16, 32, 22, NO_TABLE)     /* Q5_0 */ \
    DO(7, 5, 0, 1, 0, 32, 24, NO_TABLE)      /* Q5_1 */ \
    DO(8, 8, 0, 0, 0, 32, 34, NO_TABLE)      /* Q8_0 */ \
    DO(10, 2, 16, 1, 0, 256, 84, NO_TABLE)   /* Q2_K */ \
    DO(11, 3, 16, 0, 4, 256, 110, NO_TABLE)  /* Q3_K */ \
    DO(12, 4, 8, 1, 0, 256, 144, NO_TABLE)   /* Q4_K */ \
    DO(13, 5, 8, 1, 0, 256, 176, NO_TABLE)   /* Q5_K */ \
    DO(14, 6, 16, 0, 32, 256, 210, NO_TABLE) /* Q6_K */ \
    DO(20, 4, 0, 0, 0, 32, 18, CURVE)        /* IQ4_NL */ \
    DO(23, 4, 8, 0, 0, 256, 136, CURVE)      /* IQ4_XS */ \
    DO(39, 4, 0, 0, 0, 32, 17, MXFP4)
