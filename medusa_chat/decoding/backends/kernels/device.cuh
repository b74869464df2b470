// What the kernels of products.cu and blocks.cu have in common: the device's own instructions, which
// a test on a CPU puts its own in place of, and pairs of numbers looked up in shared memory.

#define WARPS 8
#define THREADS (32 * WARPS)

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;

#ifndef EMULATED // on a CPU, by a test
#define DEVICE static __device__ __forceinline__
#define KERNEL extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
#define SHARED(type, name, count) __shared__ __align__(16) type name[count]
#define RING(name, size) extern __shared__ __align__(16) u8 name[]
#define SYNC __syncthreads

#if IS_BF16
#define KIND "bf16"
#else
#define KIND "f16"
#endif

// Copies 16 bytes to shared memory, or zeros where `size` is 0, while the program goes on.
DEVICE void copy16(void *to, const u8 *from, int size) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 :: "r"((u32)__cvta_generic_to_shared(to)), "l"(from), "r"(size) : "memory");
}

DEVICE void copy4(void *to, const float *from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;"
                 :: "r"((u32)__cvta_generic_to_shared(to)), "l"(from) : "memory");
}

// Waits for all copies of this warp.
DEVICE void copied(void) {
    asm volatile("cp.async.wait_all;" ::: "memory");
    __syncwarp();
}

// Two signed bytes of a word, the first of them byte `first`, as two numbers.
DEVICE u32 numbers(u32 word, int first) {
    const u32 shifted = word ^ 0x80808080; // 128 more
    u32 found;
#if IS_BF16
    float low = __int_as_float(__byte_perm(shifted, 0x4B000000, 0x7650 + first)) - 8388736.0f;
    float high = __int_as_float(__byte_perm(shifted, 0x4B000000, 0x7651 + first)) - 8388736.0f;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(found) : "f"(high), "f"(low));
#else
    const u32 larger = __byte_perm(shifted, 0x64646464, 0x4140 + 0x101 * first); // 1024 more
    asm("sub.f16x2 %0, %1, %2;" : "=r"(found) : "r"(larger), "r"(0x64806480));
#endif
    return found;
}

DEVICE u16 rounded(float value) {
    u16 half;
    asm("cvt.rn." KIND ".f32 %0, %1;" : "=h"(half) : "f"(value));
    return half;
}

// sum += A B for 16 outputs (g and g + 8 of each thread), 16 inputs and 8 rows.
DEVICE void multiply(float sum[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32." KIND "." KIND ".f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Two numbers, of which `pair` has one in each half, less `by`: whole ones from 0 to 63.
DEVICE u32 lowered(u32 pair, u32 by) {
    u32 found;
#if IS_BF16
    const u32 larger = pair | 0x43004300; // 128 more
    asm("fma.rn.bf16x2 %0, %1, %2, %3;"
        : "=r"(found) : "r"(larger), "r"(0x3F803F80), "r"((0xC300 + by) * 0x10001));
#else
    const u32 larger = pair | 0x64006400; // 1024 more
    asm("sub.f16x2 %0, %1, %2;" : "=r"(found) : "r"(larger), "r"((0x6400 + by) * 0x10001));
#endif
    return found;
}

DEVICE float of_half(u16 half) { // fp16, whatever the products are computed in
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(half));
    return value;
}

DEVICE float of_bits(u32 bits) { return __int_as_float(bits); }

DEVICE void warp_waits(void) { __syncwarp(); }
#endif

// The pair of weights of the byte in bits 7 to 14 of `shifted`. bank: 4 times the lane.
DEVICE u32 pair(const u32 *pairs, u32 shifted, u32 bank) {
    return *(const u32 *)((const char *)pairs + ((shifted & 0x7F80) | bank));
}

// Of each byte its pair of numbers, the one of its high half first, for every bank.
DEVICE void fill(u32 *pairs, const u16 *table, int thread) {
    const u32 both = table[thread >> 4] | (u32)table[thread & 15] << 16;
    const uint4 four = {both, both, both, both};
#pragma unroll
    for (int i = 0; i < 8; i++) ((uint4 *)pairs)[8 * thread + (i + thread) % 8] = four;
}
