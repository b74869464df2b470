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

/* The panels from `at` to `end`, which are of HALVES, of every row. p is ready. */
void multiply_tiles(const Product *p, int at, int end);

#if HAS_TILES
#define DEEP 32 /* numbers of bf16 in a row of a tile */

extern int may_use_tiles; /* whether the kernel lets this process */

typedef struct {
    uint8_t palette, start, unused[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} Shapes;

#define SHAPE(s) __asm__ volatile("ldtilecfg %0" : : "m"(s))
#define RELEASE __asm__ volatile("tilerelease" : :)
#define CLEAR(t) __asm__ volatile("tilezero %%tmm" #t : :)
#define LOAD(t, at, stride) \
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #t : : "r"(at), "r"(stride) : "memory")
#define STORE(t, at, stride) \
    __asm__ volatile("tilestored %%tmm" #t ", (%0,%1,1)" : : "r"(at), "r"(stride) : "memory")
#define DOT(sums, x, w) \
    __asm__ volatile("tdpbf16ps %%tmm" #w ", %%tmm" #x ", %%tmm" #sums : :)

#define CLEAR_SUMS \
    CLEAR(0);      \
    CLEAR(1);      \
    CLEAR(2);      \
    CLEAR(3)
#define STORE_SUMS(sums) \
    STORE(0, sums[0], (ptrdiff_t)64);   \
    STORE(1, sums[1], (ptrdiff_t)64);   \
    STORE(2, sums[2], (ptrdiff_t)64);   \
    STORE(3, sums[3], (ptrdiff_t)64)
#endif
