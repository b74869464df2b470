/* products.cu or blocks.cu on a CPU: the threads of a block in turn, each until it has to wait for others. What
 * its assembler does stands here as the PTX manual says it. SOURCE: the file. */
#define _GNU_SOURCE
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

#define EMULATED
#define DEVICE static inline
#define KERNEL static void
#define SHARED(type, name, count) static _Alignas(16) type name[count]
#define RING(name, size) static _Alignas(16) unsigned char name[size]
#define SYNC() wait_for(0, THREADS)

typedef struct { uint32_t x, y; } uint2;
typedef struct { uint32_t x, y, z, w; } uint4;
static struct { int x; } threadIdx, blockIdx, gridDim;

enum { MOST = 256, STACK = 1 << 16 };
static ucontext_t threads[MOST], scheduler;
static int waits[2][MOST], is_over[MOST]; /* a thread's waits for the block, and for its warp */

/* Until the `count` threads from `first` on have waited as often as this one. */
static void wait_for(int first, int count) {
    const int me = threadIdx.x, kind = count == 32, times = ++waits[kind][me];
    for (;;) {
        int are_here = 1;
        for (int i = first; i < first + count; i++)
            are_here &= waits[kind][i] >= times || is_over[i];
        if (are_here) return;
        swapcontext(&threads[me], &scheduler);
        threadIdx.x = me;
    }
}

static int warp_of(int thread) { return thread / 32 * 32; }
static int min(int a, int b) { return a < b ? a : b; }

/* Copies come only when they are waited for, as late as the device may bring them. */
static struct { void *to; const void *from; int size; } pending[MOST][64];
static int pending_count[MOST];

static void later(void *to, const void *from, int size) {
    const int i = pending_count[threadIdx.x]++;
    if (i >= 64) abort();
    pending[threadIdx.x][i].to = to;
    pending[threadIdx.x][i].from = from;
    pending[threadIdx.x][i].size = size;
}
static void copy16(void *to, const unsigned char *from, int size) { later(to, size ? from : 0, 16); }
static void copy4(void *to, const float *from) { later(to, from, 4); }
static void copied(void) {
    const int me = threadIdx.x;
    for (int i = 0; i < pending_count[me]; i++) {
        if (pending[me][i].from) memcpy(pending[me][i].to, pending[me][i].from, pending[me][i].size);
        else memset(pending[me][i].to, 0, pending[me][i].size);
    }
    pending_count[me] = 0;
    wait_for(warp_of(me), 32);
}

static float number(uint16_t half) {
    float value;
#if IS_BF16
    const uint32_t bits = (uint32_t)half << 16;
    memcpy(&value, &bits, 4);
#else
    _Float16 small;
    memcpy(&small, &half, 2);
    value = (float)small;
#endif
    return value;
}

static uint16_t rounded(float value) {
    uint16_t half;
#if IS_BF16
    uint32_t bits;
    memcpy(&bits, &value, 4);
    half = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
#else
    const _Float16 small = value;
    memcpy(&half, &small, 2);
#endif
    return half;
}

static uint32_t numbers(uint32_t word, int first) {
    const float low = (int8_t)(word >> 8 * first), high = (int8_t)(word >> 8 * (first + 1));
    return rounded(low) | (uint32_t)rounded(high) << 16;
}

static uint32_t lowered(uint32_t pair, uint32_t by) {
    const float low = (float)(pair & 0xFFFF) - by, high = (float)(pair >> 16) - by;
    return rounded(low) | (uint32_t)rounded(high) << 16;
}

static float of_half(uint16_t half) {
    _Float16 small;
    memcpy(&small, &half, 2);
    return (float)small;
}

static float of_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

static void warp_waits(void) { wait_for(warp_of(threadIdx.x), 32); }

/* mma.m16n8k16: which numbers of the three matrices a thread has. */
static void multiply(float sum[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                     uint32_t b1) {
    static uint32_t held[MOST][6];
    const int me = threadIdx.x, first = warp_of(me), g = me % 32 / 4, t = me % 4;
    const uint32_t mine[6] = {a0, a1, a2, a3, b0, b1};
    memcpy(held[me], mine, sizeof mine);
    wait_for(first, 32);
    for (int i = 0; i < 4; i++) {
        for (int k = 0; k < 16; k++) {
            const int pair = k % 8 / 2, upper = k / 8, shift = 16 * (k % 2);
            const uint32_t a = held[first + 4 * g + pair][2 * upper + i / 2] >> shift;
            const uint32_t b = held[first + 4 * (2 * t + i % 2) + pair][4 + upper] >> shift;
            sum[i] += number(a) * number(b);
        }
    }
    wait_for(first, 32);
}

#include SOURCE

static void (*body)(void); /* one thread of what is asked for */

static void run_thread(int me) {
    threadIdx.x = me;
    body();
    is_over[me] = 1;
}

static void run_all(int grid) {
    char *stacks = malloc((size_t)MOST * STACK);
    gridDim.x = grid;
    for (blockIdx.x = 0; blockIdx.x < grid; blockIdx.x++) {
        for (int i = 0; i < THREADS; i++) {
            waits[0][i] = waits[1][i] = is_over[i] = pending_count[i] = 0;
            getcontext(&threads[i]);
            threads[i].uc_stack.ss_sp = stacks + (size_t)i * STACK;
            threads[i].uc_stack.ss_size = STACK;
            threads[i].uc_link = &scheduler;
            makecontext(&threads[i], (void (*)(void))run_thread, 1, i);
        }
        for (int left = THREADS; left;) {
            left = 0;
            for (int i = 0; i < THREADS; i++)
                if (!is_over[i]) left++, swapcontext(&scheduler, &threads[i]);
        }
    }
    free(stacks);
}

#ifdef TILE /* blocks.cu */
static struct {
    const u8 *tiles;
    const u16 *x, *table;
    Out *out;
    int rows, inputs, outputs, units, stride;
} asked;

static void call(void) {
    product(asked.tiles, asked.x, asked.table, asked.out, asked.rows, asked.inputs, asked.outputs,
            asked.units, asked.stride);
}

void launch(int grid, const u8 *tiles, const u16 *x, const u16 *table, Out *out, int rows,
            int inputs, int outputs, int units, int stride) {
    asked.tiles = tiles, asked.x = x, asked.table = table, asked.out = out;
    asked.rows = rows, asked.inputs = inputs, asked.outputs = outputs;
    asked.units = units, asked.stride = stride;
    body = call;
    run_all(grid);
}
#else
static struct {
    const u8 *codes;
    const float *scales;
    const u16 *x, *table;
    u16 *out;
    int rows, outputs, blocks;
} asked;

static void call(void) {
    product(asked.codes, asked.scales, asked.x, asked.table, asked.out, asked.rows, asked.outputs,
            asked.blocks);
}

void launch(int grid, const u8 *codes, const float *scales, const u16 *x, const u16 *table,
            u16 *out, int rows, int outputs, int blocks) {
    asked.codes = codes, asked.scales = scales, asked.x = x, asked.table = table, asked.out = out;
    asked.rows = rows, asked.outputs = outputs, asked.blocks = blocks;
    body = call;
    run_all(grid);
}
#endif
