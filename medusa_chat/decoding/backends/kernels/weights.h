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
   PACKED + a type of ggml: the blocks of a GGUF file, in the order of packed.h. */
enum { FLOATS, HALVES, UPPERS, PACKED = 16 };

typedef struct {
    const void *panels;
    int64_t kind;
} Weights;

/* Whether x is not rounded. */
INLINE int takes_floats(const Weights *w) { return w->kind == FLOATS || w->kind == UPPERS; }

INLINE int is_packed(const Weights *w) { return w->kind >= PACKED; }

/* Bytes of a panel of weights with so many inputs. */
ptrdiff_t panel_size(const Weights *w, ptrdiff_t ins);
