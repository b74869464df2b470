/* The numbers of a GGUF file's weights out of panels, and into them.

   Of GROUP outputs and two inputs the numbers stand in the order of HALVES: output i / 2, input
   i % 2, for i from 0 to 31. Those of 4 bits lie in words of four, which are of four pairs
   of inputs, so that a word shifted by 4 bits is the index of the next one. */

#include <string.h>

#include "half.h"
#include "packed.h"
#include "tiles.h"

#define GROUP 16       /* outputs whose numbers stand together */
#define BOTH 32        /* of them and two inputs */
#define IN_A_WORD 4
#define AHEAD 4096

typedef uint16_t numbers __attribute__((vector_size(32), aligned(2), may_alias));
typedef int8_t some __attribute__((vector_size(16), aligned(1), may_alias));

/* Four pairs of inputs of a group to whole numbers of 16 bits; `apart` numbers between pairs. */
INLINE void words_to_ints(const uint8_t *words, uint16_t *to, ptrdiff_t apart) {
    _Pragma("GCC unroll 2") for (int i = 0; i < BOTH; i += 16) {
        const numbers x = *(const numbers *)(words + 2 * i);
        _Pragma("GCC unroll 4") for (int j = 0; j < IN_A_WORD; j++)
            *(numbers *)(to + j * apart + i) = (x >> (4 * j)) & 15;
    }
}

/* A pair of inputs of a group. */
INLINE void bytes_to_ints(const uint8_t *bytes, uint16_t *to) {
    _Pragma("GCC unroll 2") for (int i = 0; i < BOTH; i += 16)
        *(numbers *)(to + i) = __builtin_convertvector(*(const some *)(bytes + i), numbers);
}

/* A block of a panel, by what spreads four pairs of 4 bits, and a pair of 8. */
#define UNPACK(NAME, SPREAD_4, SPREAD_8)                                         \
    void NAME(const Weights *w, const void *codes, uint16_t *to) {               \
        const uint8_t *from = codes;                                             \
        const ptrdiff_t apart = 2 * PANEL;                                       \
        for (int g = 0; g < PANEL / GROUP; g++) {                                \
            uint16_t *at = to + g * BOTH, *end = at + w->block / 2 * apart;      \
            if (w->kind == NIBBLES)                                              \
                for (; at < end; at += IN_A_WORD * apart, from += 2 * BOTH) {    \
                    __builtin_prefetch(from + AHEAD);                            \
                    SPREAD_4(from, at, apart);                                   \
                }                                                                \
            else                                                                 \
                for (; at < end; at += apart, from += BOTH) {                    \
                    __builtin_prefetch(from + AHEAD);                            \
                    SPREAD_8(from, at);                                          \
                }                                                                \
        }                                                                        \
    }
UNPACK(unpack_to_ints, words_to_ints, bytes_to_ints)

#if HAS_TILES
typedef uint16_t line __attribute__((vector_size(64)));
typedef int32_t line_ints __attribute__((vector_size(64)));
typedef float line_floats __attribute__((vector_size(64)));

INLINE line line_at(const void *p) {
    line x;
    memcpy(&x, p, sizeof x);
    return x;
}

/* The numbers 0 to 15 as bf16, twice: of an index the lower five bits count. */
static const line table = {
    0,      0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0, 0x4100, 0x4110, 0x4120,
    0x4130, 0x4140, 0x4150, 0x4160, 0x4170, 0,      0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0,
    0x40c0, 0x40e0, 0x4100, 0x4110, 0x4120, 0x4130, 0x4140, 0x4150, 0x4160, 0x4170};

/* As words_to_ints, to bf16. */
INLINE void words_to_bf16(const uint8_t *words, uint16_t *to, ptrdiff_t apart) {
    const line x = line_at(words);
    _Pragma("GCC unroll 4") for (int j = 0; j < IN_A_WORD; j++) {
        line found;
        __asm__("vpermw %1, %2, %0" : "=v"(found) : "v"(table), "v"(x >> (4 * j)));
        memcpy(to + j * apart, &found, sizeof found);
    }
}

/* A pair of inputs of a group: whole numbers of 8 bits are exact in the upper half of a float. */
INLINE void bytes_to_bf16(const uint8_t *bytes, uint16_t *to) {
    static const line upper = {1,  3,  5,  7,  9,  11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31,
                               33, 35, 37, 39, 41, 43, 45, 47, 49, 51, 53, 55, 57, 59, 61, 63};
    typedef char sixteen __attribute__((vector_size(16), aligned(1), may_alias));
    line_ints low, high;
    __asm__("vpmovsxbd %1, %0" : "=v"(low) : "m"(*(const sixteen *)bytes));
    __asm__("vpmovsxbd %1, %0" : "=v"(high) : "m"(*(const sixteen *)(bytes + 16)));
    line_floats a = __builtin_convertvector(low, line_floats);
    line_floats b = __builtin_convertvector(high, line_floats);
    line found = upper;
    __asm__("vpermi2w %2, %1, %0" : "+v"(found) : "v"(a), "v"(b));
    memcpy(to, &found, sizeof found);
}

UNPACK(unpack_to_bf16, words_to_bf16, bytes_to_bf16)
#else
void unpack_to_bf16(const Weights *w, const void *codes, uint16_t *to) {
    (void)w, (void)codes, (void)to;
}
#endif

void unpack_scales(const Weights *w, const void *stored, float *to) {
    if (w->is_wide) {
        memcpy(to, stored, sizeof(float) * PANEL);
        return;
    }
    for (int j = 0; j < PANEL; j += LANES) {
        const halves bits = *(const halves *)((const uint16_t *)stored + j);
#if defined(__F16C__)
        vec found;
        __asm__("vcvtph2ps %1, %0" : "=x"(found) : "x"(bits));
        store(to + j, found);
#else
        const words whole = __builtin_convertvector(bits, words);
        const vec size = (vec)((whole & 0x7fff) << 13) * 0x1p112f; /* of fp16, finite */
        store(to + j, (vec)((words)size | (whole & 0x8000) << 16));
#endif
    }
}

/* numbers [outs, ins] of one byte each, scales and floors [outs, ins / block] of two bytes, where
   is_wide of four, to panels as `w` says, which are 0 before. */
EXPORT void pack_numbers(const Weights *w, const uint8_t *numbers, const char *scales,
                         const char *floors, uint8_t *panels, int64_t outs, int64_t ins) {
    const int64_t each = w->is_wide ? 4 : 2, blocks = ins / w->block;
    for (int64_t at = 0; at < outs; at += PANEL)
        for (int64_t b = 0; b < blocks; b++) {
            for (int table = 0; table < (w->has_floor ? 2 : 1); table++, panels += PANEL * each)
                for (int64_t j = 0; j < PANEL && at + j < outs; j++) {
                    const char *from = table ? floors : scales;
                    memcpy(panels + j * each, from + ((at + j) * blocks + b) * each, each);
                }
            for (int64_t g = 0; g < PANEL; g += GROUP)
                for (int64_t k = 0; k < w->block; k += 2)
                    for (int64_t i = 0; i < BOTH; i++) {
                        const int64_t out = at + g + i / 2, in = b * w->block + k + i % 2;
                        const uint8_t code = out < outs ? numbers[out * ins + in] : 0;
                        const int64_t pair = g / GROUP * w->block / 2 + k / 2;
                        if (w->kind == BYTES) panels[pair * BOTH + i] = code;
                        else panels[(pair / IN_A_WORD * BOTH + i) * 2 + pair % IN_A_WORD / 2] |=
                            (uint8_t)(code << (pair % 2 * 4));
                    }
            panels += w->block * PANEL / (w->kind == BYTES ? 1 : 2);
        }
}

/* Bytes of packed panels. */
EXPORT int64_t packed_size(const Weights *w, int64_t outs, int64_t ins) {
    return (outs + PANEL - 1) / PANEL * panel_size(w, ins);
}
