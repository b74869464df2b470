/* A product is summed block by block: y = sum of scale * (numbers x) + floor * (sum of x), so no
   weight is rounded. By tiles x is rounded to bf16, in which the numbers are exact. By vectors x is
   of whole numbers of 16 bits, a block's with one scale, and a block's sum is one of whole numbers. */

#include "packed.h"

#include <string.h>

#include "half.h"
#include "team.h"
#include "tiles.h"

#define CHUNK 64  /* inputs of a panel that are unpacked at once: the largest block */
#define FEWEST 16 /* inputs of a block */
#define BLOCKS (CHUNK / FEWEST)
#define ROWS 16 /* that are multiplied at once */

#if defined(__AVX512F__)
typedef float lanes __attribute__((vector_size(64), aligned(4), may_alias));
INLINE lanes added(lanes a, lanes b, lanes sum) {
    __asm__("vfmadd231ps %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
    return sum;
}
#else
typedef loose lanes;
INLINE lanes added(lanes a, lanes b, lanes sum) { return fused(a, b, sum); }
#endif
#define WIDTH ((int)(sizeof(lanes) / sizeof(float)))

/* Some inputs of a panel. */
typedef struct {
    const Product *p;
    int from, count, blocks, is_tiled; /* count: inputs */
    __attribute__((aligned(64))) float scales[BLOCKS][PANEL], floors[BLOCKS][PANEL];
    __attribute__((aligned(64))) uint16_t numbers[CHUNK * PANEL];
    __attribute__((aligned(64))) float sums[BLOCKS][ROWS][PANEL];
} Chunk;

static size_t whole_lines(size_t bytes) { return (bytes + 63) / 64 * 64; }

/* Bytes of a number for each row and block. */
static size_t table_size(const Product *p) {
    return whole_lines((size_t)p->rows * (size_t)(p->ins / p->weights.block) * 4);
}

/* Behind x: the sums of x over each block, the scales of its whole numbers, and the outputs. */
static float *totals_at(const Product *p) {
    return (float *)((char *)p->x + whole_lines((size_t)p->rows * (size_t)p->ins * 2));
}
static float *scales_at(const Product *p) { return totals_at(p) + table_size(p) / 4; }
static float *outputs_at(const Product *p) { return scales_at(p) + table_size(p) / 4; }

size_t packed_room(const Product *p) {
    return 64 + 2 * table_size(p) + (size_t)p->rows * PANEL * 4;
}

/* A block of x to bf16; its sum. */
static float round_block(const float *x, uint16_t *to, int block) {
    vec sum = all(0.0f);
    for (int k = 0; k < block; k += LANES) {
        const halves near = narrow(load(x + k));
        *(halves *)(to + k) = near;
        sum += widen(near);
    }
    return total(sum);
}

/* A block of x to whole numbers of 16 bits; their scale, and their sum times it. What is no number
   makes the scale none. */
static float count_block(const float *x, uint16_t *to, int block, float *scale) {
    vec most = all(0.0f), sizes = all(0.0f), sum = all(0.0f);
    for (int k = 0; k < block; k += LANES) {
        const vec size = larger(load(x + k), -load(x + k));
        most = larger(size, most);
        sizes += size;
    }
    float high = most[0];
    for (int i = 1; i < LANES; i++) high = most[i] > high ? most[i] : high;
    *scale = high / 32767.0f + (total(sizes) - total(sizes)); /* inf - inf is no number */
    const float inverse = high > 0x1p-100f ? 32767.0f / high : 0.0f;
    for (int k = 0; k < block; k += LANES) {
        const vec near = nearest(load(x + k) * inverse);
        *(halves *)(to + k) = __builtin_convertvector(__builtin_convertvector(near, ints), halves);
        sum += near;
    }
    return total(sum) * *scale;
}

void round_packed(const Product *p, const float *x) {
    const int block = p->weights.block, count = p->rows * (p->ins / block), tiled = is_tiled(p);
    float *totals = totals_at(p), *scales = scales_at(p);
    uint16_t *to = (uint16_t *)p->x;
    for (int b = 0; b < count; b++, x += block, to += block)
        totals[b] = tiled ? round_block(x, to, block) : count_block(x, to, block, scales + b);
}

static void unpack_chunk(Chunk *c, const char *panel) {
    const Weights *w = &c->p->weights;
    const ptrdiff_t size = panel_size(w, w->block), table = PANEL * (w->is_wide ? 4 : 2);
    panel += c->from / w->block * size;
    for (int b = 0; b < c->blocks; b++, panel += size) {
        unpack_scales(w, panel, c->scales[b]);
        if (w->has_floor) unpack_scales(w, panel + table, c->floors[b]);
        (c->is_tiled ? unpack_to_bf16 : unpack_to_ints)(w, panel + table * (1 + w->has_floor),
                                                        c->numbers + b * w->block * PANEL);
    }
}

#if HAS_TILES
/* Tiles 0 and 1 are sums of a panel's two halves, 4 rows of x, 6 and 7 numbers. */
static void shape(int block, int rows) {
    Shapes s = {.palette = 1};
    const int deep = least(block, DEEP);
    for (int t = 0; t < 8; t++) s.row_bytes[t] = 64, s.rows[t] = (uint8_t)rows;
    s.row_bytes[4] = (uint16_t)(2 * deep), s.rows[6] = s.rows[7] = (uint8_t)(deep / 2);
    SHAPE(s);
}

/* One block's products go to the sums LEFT and RIGHT. */
#define BLOCK_BY_TILES(LEFT, RIGHT)                                          \
    CLEAR(LEFT);                                                             \
    CLEAR(RIGHT);                                                            \
    for (int k = 0; k < block; k += deep, x += 2 * deep, w += deep / 2 * line) { \
        LOAD(4, x, stride);                                                  \
        LOAD(6, w, line);                                                    \
        DOT(LEFT, 4, 6);                                                     \
        LOAD(7, w + 64, line);                                               \
        DOT(RIGHT, 4, 7);                                                    \
    }
#define STORE_BLOCK(LEFT, RIGHT, b)         \
    STORE(LEFT, c->sums[b][0], line);       \
    STORE(RIGHT, c->sums[b][0] + 16, line)

static void sum_by_tiles(Chunk *c, int row) {
    const Product *p = c->p;
    const ptrdiff_t stride = (ptrdiff_t)p->ins * 2, line = PANEL * 4;
    const char *x = (const char *)p->x + row * stride + 2 * c->from, *w = (const char *)c->numbers;
    const int block = p->weights.block, deep = least(block, DEEP);
    for (int b = 0; b < c->blocks; b += 2) { /* two at once: each waits for its products */
        const int both = b + 1 < c->blocks;
        BLOCK_BY_TILES(0, 1)
        if (both) {
            BLOCK_BY_TILES(2, 3)
        }
        STORE_BLOCK(0, 1, b);
        if (both) {
            STORE_BLOCK(2, 3, b + 1);
        }
    }
}
#else
static void shape(int block, int rows) { (void)block, (void)rows; }
static void sum_by_tiles(Chunk *c, int row) { (void)c, (void)row; }
#define RELEASE (void)0
#endif

/* Lane by lane a[0] * b[0] + a[1] * b[1] + sums of two whole numbers of 16 bits each. */
INLINE ints counted(ints a, ints b, ints sums) {
#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
    __asm__("vpdpwssd %2, %1, %0" : "+v"(sums) : "v"(a), "v"(b));
    return sums;
#elif defined(__AVX2__)
    typedef int16_t pairs __attribute__((vector_size(32)));
    return sums + (ints)__builtin_ia32_pmaddwd256((pairs)a, (pairs)b);
#else
    return sums + (a << 16 >> 16) * (b << 16 >> 16) + (a >> 16) * (b >> 16);
#endif
}

/* The sums of COUNT rows from `row` on, which are the chunk's from `i` on; they share what they
   read. */
#define SUM(COUNT)                                                                              \
    static void sum_##COUNT(Chunk *c, int row, int i) {                                         \
        const Product *p = c->p;                                                                \
        const int block = p->weights.block, apart = p->ins / block;                             \
        for (int b = 0; b < c->blocks; b++) {                                                   \
            const int at = c->from + b * block;                                                 \
            const int32_t *x = (const int32_t *)p->x + (ptrdiff_t)row * p->stride + at / 2;     \
            const float *scales = scales_at(p) + (ptrdiff_t)row * apart + at / block;           \
            for (int j = 0; j < PANEL; j += 2 * LANES) {                                        \
                const ints *w = (const ints *)(c->numbers + b * block * PANEL + 2 * j);         \
                ints sums[2 * COUNT] = {0};                                                     \
                for (int k = 0; k < block / 2; k++, w += PANEL / LANES)                         \
                    _Pragma("GCC unroll 8") for (int r = 0; r < COUNT; r++) {                   \
                        const ints ours = (ints)all(0.0f) + x[(ptrdiff_t)r * p->stride + k];    \
                        sums[2 * r] = counted(ours, w[0], sums[2 * r]);                         \
                        sums[2 * r + 1] = counted(ours, w[1], sums[2 * r + 1]);                 \
                    }                                                                           \
                _Pragma("GCC unroll 8") for (int r = 0; r < 2 * COUNT; r++)                     \
                    store(c->sums[b][i + r / 2] + j + r % 2 * LANES,                            \
                          __builtin_convertvector(sums[r], vec) * scales[r / 2 * apart]);       \
            }                                                                                   \
        }                                                                                       \
    }
SUM(1)
SUM(4)

static void sum_by_vectors(Chunk *c, int row, int rows) {
    for (int i = 0, count; i < rows; i += count) {
        count = i + 4 <= rows ? 4 : 1;
        (count == 4 ? sum_4 : sum_1)(c, row + i, i);
    }
}

/* What the chunk's blocks add to COUNT rows of outputs of its panel; they share what they read. */
#define ADD(COUNT)                                                                             \
    static void add_##COUNT(const Chunk *c, int i, float *y, const float *totals, int apart) { \
        for (int j = 0; j < PANEL; j += WIDTH) {                                               \
            lanes sums[COUNT];                                                                 \
            _Pragma("GCC unroll 8") for (int r = 0; r < COUNT; r++)                            \
                sums[r] = *(const lanes *)(y + r * PANEL + j);                                 \
            for (int b = 0; b < c->blocks; b++) {                                              \
                const lanes scale = *(const lanes *)(c->scales[b] + j);                        \
                _Pragma("GCC unroll 8") for (int r = 0; r < COUNT; r++)                        \
                    sums[r] = added(*(const lanes *)(c->sums[b][i + r] + j), scale, sums[r]);  \
                if (!totals) continue;                                                         \
                const lanes floor = *(const lanes *)(c->floors[b] + j);                        \
                _Pragma("GCC unroll 8") for (int r = 0; r < COUNT; r++)                        \
                    sums[r] = added(totals[r * apart + b] - (lanes){0}, floor, sums[r]);       \
            }                                                                                  \
            _Pragma("GCC unroll 8") for (int r = 0; r < COUNT; r++)                            \
                *(lanes *)(y + r * PANEL + j) = sums[r];                                       \
        }                                                                                      \
    }
ADD(1)
ADD(4)

static void add_chunk(const Chunk *c, int row, int rows) {
    const Product *p = c->p;
    const int apart = p->ins / p->weights.block;
    float *y = outputs_at(p) + (ptrdiff_t)row * PANEL;
    const float *totals = totals_at(p) + (ptrdiff_t)row * apart + c->from / p->weights.block;
    for (int i = 0, count; i < rows; i += count, y += count * PANEL, totals += count * apart) {
        count = i + 4 <= rows ? 4 : 1;
        (count == 4 ? add_4 : add_1)(c, i, y, p->weights.has_floor ? totals : NULL, apart);
    }
}

void multiply_packed(const Product *p, int at, int end) {
    const ptrdiff_t size = panel_size(&p->weights, p->ins);
    const char *panel = (const char *)p->weights.panels + at * size;
    const int tiled = is_tiled(p), block = p->weights.block;
    float *outputs = outputs_at(p);
    Chunk c = {.p = p, .is_tiled = tiled};
    int shaped = 0;
    for (; at < end; at++, panel += size) {
        memset(outputs, 0, (size_t)p->rows * PANEL * sizeof *outputs);
        for (c.from = 0; c.from < p->ins; c.from += c.count) {
            c.count = least(CHUNK / block * block, p->ins - c.from), c.blocks = c.count / block;
            unpack_chunk(&c, panel);
            for (int row = 0, rows; row < p->rows; row += rows) {
                rows = least(ROWS, p->rows - row);
                if (tiled && shaped != rows) shape(block, shaped = rows);
                if (tiled) sum_by_tiles(&c, row);
                else sum_by_vectors(&c, row, rows);
                add_chunk(&c, row, rows);
            }
        }
        for (int i = 0; i < p->rows; i++)
            for (int j = 0; j < PANEL; j += LANES)
                put(p, i, at * PANEL + j, load(outputs + (ptrdiff_t)i * PANEL + j));
    }
    if (tiled) RELEASE;
}
