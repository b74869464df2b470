/* Weights in panels of PANEL outputs, as they are read one behind the other. */

#pragma once

#include <stddef.h>
#include <stdint.h>

#include "vectors.h"

#if defined(__aarch64__)
#define VECTORS 4 /* of a panel, so that six rows of it have their sums in 32 registers, or in 16 */
#else
#define VECTORS 2
#endif
#define PANEL (VECTORS * WIDTH)

/* What a panel is made of; what is beyond the last output and input is 0.
   FLOATS: fp32 [ins, PANEL]. HALVES: bf16 [ins / 2, PANEL, 2]. UPPERS: the same of fp32 weights whose
   lower halves are 0; ins is even.
   NIBBLES, BYTES: whole numbers of 4 bits from 0 on or of 8 with a sign, as a GGUF file has them, of
   which `block` inputs have one scale, and one floor where has_floor: weight = scale * number +
   floor. Block by block [PANEL] scales, [PANEL] floors, and the numbers in the order of packed.h;
   scales and floors are of fp16, where is_wide of fp32. */
enum { FLOATS, HALVES, UPPERS, NIBBLES, BYTES };

typedef struct {
    const void *panels;
    int32_t kind, block, has_floor, is_wide;
} Weights;

/* Whether x is not rounded. */
INLINE int takes_floats(const Weights *w) { return w->kind == FLOATS || w->kind == UPPERS; }

INLINE int is_packed(const Weights *w) { return w->kind >= NIBBLES; }

/* Bytes of a panel of weights with so many inputs. */
INLINE ptrdiff_t panel_size(const Weights *w, ptrdiff_t ins) {
    if (w->kind == FLOATS) return ins * PANEL * 4;
    if (!is_packed(w)) return (ins + 1) / 2 * PANEL * 4;
    const ptrdiff_t scales = PANEL * (w->is_wide ? 4 : 2) * (w->has_floor ? 2 : 1);
    return ins / w->block * scales + ins * PANEL / (w->kind == NIBBLES ? 2 : 1);
}
