/* Weights of a GGUF file to the bf16 that they stand for, and into panels.

   Of 16 outputs and two inputs the numbers stand so that they unpack in the order of HALVES: output
   i / 2, input i % 2, for i from 0 to 15, then the same of the outputs from 8 on. Of 4 bits the
   former are the lower halves of 16 bytes and the latter the upper ones. */

#include <string.h>

#include "half.h"
#include "weights.h"

#define GROUP 16 /* outputs whose numbers stand together */
#define BOTH 2   /* halves of a group */
#define AHEAD 2048

#if defined(__AVX512F__) && defined(__AVX512BF16__) && defined(__AVX512VL__)
#define WIDE 16
typedef float lanes __attribute__((vector_size(64)));
typedef int32_t lane_ints __attribute__((vector_size(64)));
typedef uint8_t naturals __attribute__((vector_size(16), aligned(1), may_alias));
typedef int8_t integers __attribute__((vector_size(16), aligned(1), may_alias));
#else
#define WIDE 8
typedef vec lanes;
typedef ints lane_ints;
typedef uint8_t naturals __attribute__((vector_size(8), aligned(1), may_alias));
typedef int8_t integers __attribute__((vector_size(8), aligned(1), may_alias));
#endif
#define PARTS (GROUP / WIDE) /* vectors for half a group's outputs and two inputs */

/* Whole numbers of a byte each; GCC would take them apart one by one. */
#if defined(__AVX2__)
#define WIDENED(name, bytes, type, instruction)                                                   \
    INLINE lane_ints name(const bytes *p) {                                                       \
        lane_ints x;                                                                              \
        __asm__(instruction " %1, %0" : "=v"(x) : "m"(*(const type *)p));                         \
        return x;                                                                                 \
    }
#else
#define WIDENED(name, bytes, type, instruction)                                                   \
    INLINE lane_ints name(const bytes *p) {                                                       \
        return __builtin_convertvector(*(const type *)p, lane_ints);                              \
    }
#endif
WIDENED(wide_naturals, uint8_t, naturals, "vpmovzxbd")
WIDENED(wide_integers, uint8_t, integers, "vpmovsxbd")

/* Exact: a number has few bits, so that only the last sum is rounded. */
INLINE lanes scaled_up(lane_ints numbers, lanes scale, lanes floor) {
#if WIDE == 16
    lanes x = __builtin_convertvector(numbers, lanes);
    __asm__("vfmadd213ps %2, %1, %0" : "+v"(x) : "v"(scale), "v"(floor));
    return x;
#else
    return fused(__builtin_convertvector(numbers, lanes), scale, floor);
#endif
}

/* 2 * GROUP bf16, from the lower outputs' vectors and the upper ones'. */
INLINE void round_to(uint16_t *halves_at, const lanes *low, const lanes *high) {
#if WIDE == 16
    lanes both;
    __asm__("vcvtne2ps2bf16 %1, %2, %0" : "=v"(both) : "v"(low[0]), "v"(high[0]));
    memcpy(halves_at, &both, sizeof both);
#else
    for (int i = 0; i < PARTS; i++) {
        *(halves *)(halves_at + i * WIDE) = narrow(low[i]);
        *(halves *)(halves_at + GROUP + i * WIDE) = narrow(high[i]);
    }
#endif
}

/* A group's scales, each twice, since two inputs of an output stand side by side. */
#if WIDE == 16
INLINE void spread(const char *at, int is_wide, lanes into[BOTH][PARTS]) {
    typedef char bytes __attribute__((vector_size(32), aligned(1), may_alias));
    typedef lanes loose_lanes __attribute__((aligned(1), may_alias));
    lanes s;
    if (is_wide) s = *(const loose_lanes *)at;
    else __asm__("vcvtph2ps %1, %0" : "=v"(s) : "m"(*(const bytes *)at));
    into[0][0] = SHUFFLE(s, s, 0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
    into[1][0] = SHUFFLE(s, s, 8, 8, 9, 9, 10, 10, 11, 11, 12, 12, 13, 13, 14, 14, 15, 15);
}
#else
/* Of fp16, finite. */
INLINE vec widened(const char *p) {
    halves bits;
    memcpy(&bits, p, sizeof bits);
    const words whole = __builtin_convertvector(bits, words);
    const vec size = (vec)((whole & 0x7fff) << 13) * 0x1p112f;
    return (vec)((words)size | (whole & 0x8000) << 16);
}

INLINE void spread(const char *at, int is_wide, lanes into[BOTH][PARTS]) {
    for (int h = 0; h < BOTH; h++) {
        const vec s = is_wide ? load((const float *)at + h * LANES) : widened(at + h * 2 * LANES);
        into[h][0] = SHUFFLE(s, s, 0, 0, 1, 1, 2, 2, 3, 3);
        into[h][1] = SHUFFLE(s, s, 4, 4, 5, 5, 6, 6, 7, 7);
    }
}
#endif

/* One group's numbers of two inputs. */
INLINE void unpack_pair(int kind, const uint8_t *codes, lanes scales[BOTH][PARTS],
                        lanes floors[BOTH][PARTS], uint16_t *to) {
    lanes found[BOTH][PARTS];
    for (int i = 0; i < PARTS; i++) {
        lane_ints low, high;
        if (kind == NIBBLES) {
            const lane_ints both = wide_naturals(codes + i * WIDE);
            low = both & 15, high = both >> 4;
        } else {
            low = wide_integers(codes + i * WIDE);
            high = wide_integers(codes + GROUP + i * WIDE);
        }
        found[0][i] = scaled_up(low, scales[0][i], floors[0][i]);
        found[1][i] = scaled_up(high, scales[1][i], floors[1][i]);
    }
    round_to(to, found[0], found[1]);
}

/* The inputs from `from` to `end`, whole blocks, to [(end - from) / 2, PANEL, 2]. */
INLINE void unpack_blocks(const Weights *w, int kind, const char *panel, int from, int end,
                          uint16_t *to) {
    const int block = w->block, wide = w->is_wide, floored = w->has_floor;
    const ptrdiff_t table = PANEL * (wide ? 4 : 2), step = kind == NIBBLES ? GROUP : 2 * GROUP;
    const ptrdiff_t row = PANEL / GROUP * step, size = table * (1 + floored) + block / 2 * row;
    for (int k = from; k < end; k += block, to += (ptrdiff_t)block * PANEL) {
        const char *scales = panel + k / block * size, *floors = scales + table;
        const uint8_t *codes = (const uint8_t *)scales + table * (1 + floored);
        for (int g = 0; g < PANEL / GROUP; g++) {
            lanes scale[BOTH][PARTS], floor[BOTH][PARTS] = {0};
            const ptrdiff_t out = (ptrdiff_t)g * GROUP * (wide ? 4 : 2);
            spread(scales + out, wide, scale);
            if (floored) spread(floors + out, wide, floor);
            uint16_t *at = to + g * 2 * GROUP;
            const uint8_t *from_codes = codes + g * step;
            for (int pair = 0; pair < block / 2; pair++, from_codes += row, at += 2 * PANEL) {
                __builtin_prefetch(from_codes + AHEAD);
                unpack_pair(kind, from_codes, scale, floor, at);
            }
        }
    }
}

void unpack_panel(const Weights *w, const void *panel, int from, int end, uint16_t *to) {
    if (w->kind == NIBBLES) unpack_blocks(w, NIBBLES, panel, from, end, to);
    else unpack_blocks(w, BYTES, panel, from, end, to);
}

/* numbers [outs, ins] of one byte each, scales and floors [outs, ins / block] of two bytes, where
   is_wide of four, to panels as `w` says. */
EXPORT void pack_numbers(const Weights *w, const uint8_t *numbers, const char *scales,
                         const char *floors, uint8_t *panels, int64_t outs, int64_t ins) {
    const int64_t each = w->is_wide ? 4 : 2, blocks = ins / w->block;
    for (int64_t at = 0; at < outs; at += PANEL)
        for (int64_t b = 0; b < blocks; b++) {
            for (int table = 0; table < (w->has_floor ? 2 : 1); table++)
                for (int64_t j = 0; j < PANEL; j++, panels += each) {
                    const char *from = table ? floors : scales;
                    if (at + j < outs) memcpy(panels, from + ((at + j) * blocks + b) * each, each);
                    else memset(panels, 0, each);
                }
            for (int64_t k = b * w->block; k < (b + 1) * w->block; k += 2)
                for (int64_t g = 0; g < PANEL; g += GROUP)
                    for (int64_t i = 0; i < 2 * GROUP; i++) {
                        const int64_t out = at + g + i / 2;
                        const uint8_t code = out < outs ? numbers[out * ins + k + i % 2] : 0;
                        if (w->kind == BYTES) panels[i] = code;
                        else if (i < GROUP) panels[i] = code;
                        else panels[i - GROUP] |= (uint8_t)(code << 4);
                        if (i == 2 * GROUP - 1) panels += w->kind == BYTES ? 2 * GROUP : GROUP;
                    }
        }
}

/* Packed panels [ceil(outs / PANEL), ...] to those of HALVES. */
EXPORT void unpack(const Weights *w, uint16_t *to, int64_t outs, int64_t ins) {
    const char *panel = w->panels;
    for (int64_t at = 0; at < outs; at += PANEL, panel += panel_size(w, ins), to += ins * PANEL)
        unpack_panel(w, panel, 0, (int)ins, to);
}

/* Bytes of packed panels. */
EXPORT int64_t packed_size(const Weights *w, int64_t outs, int64_t ins) {
    return (outs + PANEL - 1) / PANEL * panel_size(w, ins);
}
