/* Products by AMX: tiles of 16 rows by 32 inputs of bf16. */

#pragma once

#include "product.h"

#if defined(__AMX_BF16__) && defined(__linux__) && PANEL == 32
#define HAS_TILES 1
#else
#define HAS_TILES 0
#endif

/* Whether a product of bf16 runs by tiles here: the CPU has them, the kernel lets this process use
   them, and its inputs fill whole ones. It does not depend on the rows. */
int is_tiled(const Product *p);

#define MOST_TILED 32 /* rows that read a panel but once */

/* `count` panels from `at` on, of every row. p is ready. w: where they lie as HALVES; NULL for the
   product's own weights, which are unpacked as they are read. */
void multiply_tiles(const Product *p, const void *w, int at, int count);
