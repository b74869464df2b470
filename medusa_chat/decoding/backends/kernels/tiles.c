#include "tiles.h"

#include <stdint.h>

#if HAS_TILES
#include <sys/syscall.h>
#include <unistd.h>

#define HIGH (MOST_TILED / 2) /* rows of a tile */
#define ASK_FOR_STATE 0x1023 /* arch_prctl: ARCH_REQ_XCOMP_PERM */
#define TILE_DATA 18

int may_use_tiles;

__attribute__((constructor)) static void ask(void) {
    may_use_tiles = !syscall(SYS_arch_prctl, ASK_FOR_STATE, TILE_DATA);
}

int is_tiled(const Product *p) {
    return may_use_tiles && p->weights.kind == HALVES && p->ins % DEEP == 0;
}

/* Tiles 0 to 3 are sums, 4 and 5 rows of x, 6 and 7 weights. Of up to 16 rows the sums are of two
   panels, of more of one: tiles 2 and 3 and 5 have the rows from 16 on. */
static void shape_tiles(int rows) {
    const int lower = rows > HIGH ? HIGH : rows, upper = rows > HIGH ? rows - HIGH : rows;
    Shapes s = {.palette = 1};
    for (int t = 0; t < 8; t++) s.row_bytes[t] = 64, s.rows[t] = HIGH;
    s.rows[0] = s.rows[1] = s.rows[4] = (uint8_t)lower;
    s.rows[2] = s.rows[3] = s.rows[5] = (uint8_t)upper;
    SHAPE(s);
}

#define LINE ((ptrdiff_t)PANEL * 4)     /* bytes of two inputs in a panel */
#define DOWN (DEEP / 2 * LINE)          /* of a tile's inputs */

typedef float Sums[HIGH][16];

INLINE void put_tile(const Product *p, Sums sums, int row, int rows, int out) {
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < 16; j += LANES)
            if (out + j < p->outs) put(p, row + i, out + j, load(sums[i] + j));
}

/* Up to 16 rows of one or two panels. */
static void low(const Product *p, const char *w, int row, int rows, int at, int panels) {
    const ptrdiff_t stride = (ptrdiff_t)p->ins * 2, panel = stride * PANEL;
    const char *x = (const char *)p->x + row * stride, *end = x + stride;
    CLEAR_SUMS;
    if (panels == 2)
        for (; x < end; x += 2 * DEEP, w += DOWN) {
            LOAD(4, x, stride);
            LOAD(6, w, LINE);
            LOAD(7, w + 64, LINE);
            DOT(0, 4, 6);
            LOAD(6, w + panel, LINE);
            DOT(1, 4, 7);
            LOAD(7, w + panel + 64, LINE);
            DOT(2, 4, 6);
            DOT(3, 4, 7);
        }
    else
        for (; x < end; x += 2 * DEEP, w += DOWN) {
            LOAD(4, x, stride);
            LOAD(6, w, LINE);
            LOAD(7, w + 64, LINE);
            DOT(0, 4, 6);
            DOT(1, 4, 7);
        }
    Sums sums[4];
    STORE_SUMS(sums);
    for (int t = 0; t < 2 * panels; t++) put_tile(p, sums[t], row, rows, at * PANEL + 16 * t);
}

/* 17 to 32 rows of a panel. */
static void high(const Product *p, const char *w, int row, int rows, int at) {
    const ptrdiff_t stride = (ptrdiff_t)p->ins * 2;
    const char *x = (const char *)p->x + row * stride, *y = x + HIGH * stride, *end = x + stride;
    CLEAR_SUMS;
    for (; x < end; x += 2 * DEEP, y += 2 * DEEP, w += DOWN) {
        LOAD(4, x, stride);
        LOAD(6, w, LINE);
        LOAD(7, w + 64, LINE);
        DOT(0, 4, 6);
        LOAD(5, y, stride);
        DOT(1, 4, 7);
        DOT(2, 5, 6);
        DOT(3, 5, 7);
    }
    Sums sums[4];
    STORE_SUMS(sums);
    for (int t = 0; t < 4; t++)
        put_tile(p, sums[t], row + t / 2 * HIGH, t < 2 ? HIGH : rows - HIGH,
                 at * PANEL + t % 2 * 16);
}

void multiply_tiles(const Product *p, int at, int end) {
    const ptrdiff_t panel = (ptrdiff_t)p->ins * PANEL * 2;
    for (int row = 0, rows; row < p->rows; row += rows) {
        rows = least(2 * HIGH, p->rows - row);
        shape_tiles(rows);
        const char *w = (const char *)p->weights.panels + at * panel;
        for (int i = at, step; i < end; i += step, w += step * panel) {
            step = rows > HIGH ? 1 : least(2, end - i);
            if (rows > HIGH) high(p, w, row, rows, i);
            else low(p, w, row, rows, i, step);
        }
    }
    RELEASE;
}

#else
int is_tiled(const Product *p) { return 0 * p->rows; }
void multiply_tiles(const Product *p, int at, int end) { (void)p, (void)at, (void)end; }
#endif
