/* Weights of a GGUF file to the bf16 that they stand for, and into panels.

   Of 16 outputs and two inputs the numbers stand so that they unpack in the order of HALVES: output
   i / 2, input i % 2, for i from 0 to 15, then the same of the outputs from 8 on. Of 4 bits the
   former are the lower halves of 16 bytes and the latter the upper ones. */

#include <string.h>

#include "half.h"
#include "weights.h"

#define GROUP 16 /* outputs whose numbers stand together */
#define BOTH 2   /* halves of a group */

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

/* Of fp16, finite. */
INLINE vec widened(const uint16_t *p) {
    halves bits;
    memcpy(&bits, p, sizeof bits);
    const words all_bits = __builtin_convertvector(bits, words);
    const vec size = (vec)((all_bits & 0x7fff) << 13) * 0x1p112f;
    return (vec)((words)size | (all_bits & 0x8000) << 16);
}

/* Eight outputs' scales, each twice, since two inputs of an output stand side by side. */
INLINE void spread(const char *at, int is_wide, lanes *into) {
    const vec s = is_wide ? load((const float *)at) : widened((const uint16_t *)at);
    const vec low = SHUFFLE(s, s, 0, 0, 1, 1, 2, 2, 3, 3), high = SHUFFLE(s, s, 4, 4, 5, 5, 6, 6, 7, 7);
#if WIDE == 16
    memcpy(into, &low, sizeof low);
    memcpy((char *)into + sizeof low, &high, sizeof high);
#else
    into[0] = low, into[1] = high;
#endif
}

/* One group's numbers of two inputs. */
INLINE void unpack_pair(int kind, const uint8_t *codes, lanes scales[BOTH][PARTS],
                        lanes floors[BOTH][PARTS], uint16_t *to) {
    lanes found[BOTH][PARTS];
    for (int i = 0; i < PARTS; i++) {
        lane_ints low, high;
        if (kind == NIBBLES) {
            const lane_ints both =
                __builtin_convertvector(*(const naturals *)(codes + i * WIDE), lane_ints);
            low = both & 15, high = both >> 4;
        } else {
            low = __builtin_convertvector(*(const integers *)(codes + i * WIDE), lane_ints);
            high = __builtin_convertvector(*(const integers *)(codes + GROUP + i * WIDE), lane_ints);
        }
        found[0][i] = scaled_up(low, scales[0][i], floors[0][i]);
        found[1][i] = scaled_up(high, scales[1][i], floors[1][i]);
    }
    round_to(to, found[0], found[1]);
}

INLINE void unpack_blocks(const Weights *w, int kind, const char *at, int ins, uint16_t *to) {
    const ptrdiff_t each = w->is_wide ? 4 : 2, step = kind == NIBBLES ? GROUP : 2 * GROUP;
    for (int k = 0; k < ins; k += w->block, to += (ptrdiff_t)w->block * PANEL) {
        const char *floors = at + PANEL * each;
        const uint8_t *codes = (const uint8_t *)floors + (w->has_floor ? PANEL * each : 0);
        const ptrdiff_t row = PANEL / GROUP * step; /* bytes of two inputs */
        for (int g = 0; g < PANEL / GROUP; g++) {
            lanes scale[BOTH][PARTS], floor[BOTH][PARTS] = {0};
            for (int h = 0; h < BOTH; h++) {
                const ptrdiff_t out = (g * GROUP + h * LANES) * each;
                spread(at + out, w->is_wide, scale[h]);
                if (w->has_floor) spread(floors + out, w->is_wide, floor[h]);
            }
            for (int pair = 0; pair < w->block / 2; pair++)
                unpack_pair(kind, codes + pair * row + g * step, scale, floor,
                            to + (ptrdiff_t)pair * 2 * PANEL + g * 2 * GROUP);
        }
        at = (const char *)codes + w->block / 2 * row;
    }
}

void unpack_panel(const Weights *w, const void *panel, int ins, uint16_t *to) {
    if (w->kind == NIBBLES) unpack_blocks(w, NIBBLES, panel, ins, to);
    else unpack_blocks(w, BYTES, panel, ins, to);
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

/* Panels back to bf16 [outs, ins]. */
EXPORT void unpack(const Weights *w, uint16_t *halves_at, uint16_t *room, int64_t outs, int64_t ins) {
    for (int64_t at = 0; at < outs; at += PANEL) {
        unpack_panel(w, (const char *)w->panels + at / PANEL * panel_size(w, ins), (int)ins, room);
        for (int64_t j = 0; j < PANEL && at + j < outs; j++)
            for (int64_t k = 0; k < ins; k++)
                halves_at[(at + j) * ins + k] = room[(k / 2 * PANEL + j) * 2 + k % 2];
    }
}
