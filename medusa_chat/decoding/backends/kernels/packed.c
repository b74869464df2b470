/* The layout of packed weights: a file's blocks into panels, and panels into numbers. */

#include "packed.h"

#include "half.h"
#include "reading.h"
#include "team.h"

#define ENTRY(TYPE, ...) [TYPE] = {__VA_ARGS__},
static const Format formats[40] = {ALL_FORMATS(ENTRY)}; /* by type of ggml */
#define TYPES ((int64_t)(sizeof formats / sizeof *formats))

const Format *format_of(int64_t kind) {
    const int64_t type = kind - PACKED;
    return type >= 0 && type < TYPES && formats[type].bits ? formats + type : NULL;
}

ptrdiff_t panel_size(const Weights *w, ptrdiff_t ins) {
    if (w->kind == FLOATS) return ins * PANEL * 4;
    if (!is_packed(w)) return (ins + 1) / 2 * PANEL * 4;
    const Format *f = format_of(w->kind);
    return ins / f->each * block_size(*f);
}

/* Bytes of the panels of a packed weight; 0 for a kind that is none, or no whole blocks. */
EXPORT int64_t packed_size(int64_t kind, int64_t outs, int64_t ins) {
    const Format *f = format_of(kind);
    if (!f || outs < 1 || ins < 1 || ins % f->each) return 0;
    const Weights w = {NULL, kind};
    return (outs + PANEL - 1) / PANEL * panel_size(&w, ins);
}

/* ---------------------------------------------------------------------------------- into panels */

/* A block of a file: its numbers, four inputs a word, and what they are multiplied by. */
typedef struct {
    uint32_t words[DEEP / 4];
    uint8_t whole[4], scales[16], floors[16]; /* two of fp16; the parts */
} Stored;

static uint32_t word(const uint8_t *p) {
    uint32_t found;
    memcpy(&found, p, sizeof found);
    return found;
}

/* Bit i of `bits` as the lowest of byte i, for four of them. */
static uint32_t spread(uint32_t bits) {
    return ((bits & 15) * 0x00204081u) & 0x01010101u;
}

/* 16 bytes: the lower halves are the first 16 inputs. */
static void read_halves(const uint8_t *p, uint32_t *to) {
    for (int i = 0; i < 4; i++) {
        to[i] = word(p + 4 * i) & LOW;
        to[i + 4] = word(p + 4 * i) >> 4 & LOW;
    }
}

static void add_fifth(const uint8_t *p, uint32_t *to) {
    const uint32_t bits = word(p);
    for (int i = 0; i < 8; i++) to[i] |= spread(bits >> 4 * i) << 4;
}

/* 128 bytes: of every 32 the lower halves are 32 inputs, the upper ones the next 32. */
static void read_lines(const uint8_t *p, uint32_t *to) {
    for (int i = 0; i < DEEP / 8; i++) {
        const uint32_t both = word(p + 4 * i);
        uint32_t *at = to + i / 8 * 16 + i % 8;
        at[0] = both & LOW, at[8] = both >> 4 & LOW;
    }
}

/* Scales and floors of 6 bits each in 12 bytes. */
static void read_sixes(const uint8_t *p, Stored *s) {
    for (int i = 0; i < 4; i++) {
        s->scales[i] = p[i] & 63, s->scales[i + 4] = (p[i + 8] & 15) | (p[i] >> 6 << 4);
        s->floors[i] = p[i + 4] & 63, s->floors[i + 4] = (p[i + 8] >> 4) | (p[i + 4] >> 6 << 4);
    }
}

/* 32 bytes for 128 inputs, 64 in all: two bits of four times 32. */
static void read_quarters(const uint8_t *p, uint32_t *to, int shift) {
    for (int i = 0; i < DEEP / 4; i++)
        to[i] |= (word(p + i / 32 * 32 + i % 8 * 4) >> (i % 32 / 8 * 2) & 0x03030303u) << shift;
}

/* 32 bytes: bit i of all is of the i-th 32 inputs. */
static void read_bits(const uint8_t *p, uint32_t *to, int shift) {
    for (int i = 0; i < DEEP / 4; i++)
        to[i] |= (word(p + i % 8 * 4) >> (i / 8) & 0x01010101u) << shift;
}

static void read_q2_k(const uint8_t *p, Stored *s) {
    memcpy(s->scales, p, 16);
    memset(s->words, 0, sizeof s->words);
    read_quarters(p + 16, s->words, 0);
    memcpy(s->whole, p + 80, 4);
    s->whole[3] ^= 0x80; /* what the file takes off is added here */
}

static void read_q3_k(const uint8_t *p, Stored *s) {
    const uint8_t *scales = p + 96;
    for (int i = 0; i < 16; i++) {
        const int low = scales[i % 8] >> (i / 8 * 4) & 15, high = scales[8 + i % 4] >> (i / 4 * 2) & 3;
        s->scales[i] = (uint8_t)((low | high << 4) - 32);
    }
    memset(s->words, 0, sizeof s->words);
    read_quarters(p + 32, s->words, 0);
    read_bits(p, s->words, 2);
    memcpy(s->whole, p + 108, 2);
}

static void read_q6_k(const uint8_t *p, Stored *s) {
    for (int i = 0; i < DEEP / 8; i++) { /* of every 64 bytes the lower halves, then the upper ones */
        const uint32_t both = word(p + 4 * i);
        uint32_t *at = s->words + i / 16 * 32 + i % 16;
        at[0] = both & LOW, at[16] = both >> 4 & LOW;
    }
    read_quarters(p + 128, s->words, 4);
    memcpy(s->scales, p + 192, 16);
    memcpy(s->whole, p + 208, 2);
}

static void read_iq4_xs(const uint8_t *p, Stored *s) {
    const int high = p[2] | p[3] << 8;
    memcpy(s->whole, p, 2);
    for (int i = 0; i < 8; i++) {
        const int low = p[4 + i / 2] >> (i % 2 * 4) & 15;
        s->scales[i] = (uint8_t)((low | (high >> 2 * i & 3) << 4) - 32);
        read_halves(p + 8 + 16 * i, s->words + 8 * i);
    }
}

static void read_k(const uint8_t *p, Stored *s, int has_fifth) {
    memcpy(s->whole, p, 4);
    s->whole[3] ^= 0x80;
    read_sixes(p + 4, s);
    read_lines(p + (has_fifth ? 48 : 16), s->words);
    if (has_fifth) read_bits(p + 16, s->words, 4);
}

static void read_stored(const Format *f, const uint8_t *p, Stored *s) {
    if (f == formats + 10) read_q2_k(p, s);
    else if (f == formats + 11) read_q3_k(p, s);
    else if (f == formats + 14) read_q6_k(p, s);
    else if (f == formats + 23) read_iq4_xs(p, s);
    else if (f->parts) read_k(p, s, f->bits == 5);
    else {
        const int head = head_size(*f) / PANEL;
        memcpy(s->whole, p, (size_t)head);
        if (f->bits == 8) memcpy(s->words, p + head, STEP);
        else read_halves(p + head + (f->bits == 5 ? 4 : 0), s->words);
        if (f->bits == 5) add_fifth(p + head, s->words);
    }
}

/* The words of `bits` for the eight words of 32 inputs. */
static void put_words(const uint32_t *w, int bits, uint32_t *to) {
    const int high = bits == 5 ? 4 : 2; /* where the bits above begin */
    uint32_t *above = to;
    if (bits == 8) {
        for (int g = 0; g < 8; g++) to[g * PANEL] = w[g];
        return;
    }
    if (bits == 6) { /* of every four words the last lies above the others, two bits on each */
        for (int i = 0; i < 6; i++, to += PANEL) {
            const uint32_t fourth = w[i / 3 * 4 + 3];
            *to = w[i / 3 * 4 + i % 3] | (fourth >> (2 - i % 3) * 2 & 0x03030303u) << 6;
        }
        return;
    }
    if (bits >= 4)
        for (int n = 0; n < 4; n++, above += PANEL)
            *above = (w[2 * n] & LOW) | (w[2 * n + 1] & LOW) << 4;
    if (bits == 2 || bits == 3)
        for (int u = 0; u < 2; u++, above += PANEL) {
            *above = 0;
            for (int i = 0; i < 4; i++)
                *above |= (w[4 * u + i] & 0x03030303u) << 2 * i;
        }
    if (bits % 2 == 0) return;
    *above = 0;
    for (int g = 0; g < 8; g++) *above |= (w[g] >> high & 0x01010101u) << g;
}

/* A block into its lane of a panel. */
static void put_stored(const Format *f, const Stored *s, char *to, int lane) {
    if (f->values == MXFP4) to[lane] = (char)s->whole[0], to += PANEL;
    else
        for (int i = 0; i < 1 + f->has_floor; i++, to += 2 * PANEL)
            memcpy(to + 2 * lane, s->whole + 2 * i, 2);
    for (int i = 0; i < f->parts; i++, to += PANEL) to[lane] = (char)s->scales[i];
    const int floors = f->has_floor && f->bits > 2 ? f->parts : 0;
    for (int i = 0; i < floors; i++, to += PANEL) to[lane] = (char)s->floors[i];
    uint32_t *words = (uint32_t *)to + lane;
    for (int b = 0; b < f->each / STEP; b++, words += f->bits * PANEL)
        put_words(s->words + 8 * b, f->bits, words);
}

typedef struct {
    const Format *format;
    const uint8_t *rows;
    char *panels;
    int64_t first_out, outs, ins, size; /* size: of a panel */
} Packing;

static void pack_part(const void *what, int part, int parts) {
    const Packing *p = what;
    const Format *f = p->format;
    const int64_t blocks = p->ins / f->each;
    const int64_t begun = p->first_out / PANEL, panels = (p->first_out + p->outs - 1) / PANEL + 1 - begun;
    const int64_t from = (begun + panels * part / parts) * PANEL - p->first_out;
    const int64_t to = (begun + panels * (part + 1) / parts) * PANEL - p->first_out;
    Stored s;
    for (int64_t i = from < 0 ? 0 : from; i < (to < p->outs ? to : p->outs); i++) {
        const int64_t out = p->first_out + i;
        const uint8_t *row = p->rows + i * blocks * f->bytes;
        char *at = p->panels + out / PANEL * p->size;
        for (int64_t b = 0; b < blocks; b++, at += block_size(*f)) {
            read_stored(f, row + b * f->bytes, &s);
            put_stored(f, &s, at, (int)(out % PANEL));
        }
    }
}

/* Some rows of a tensor as a file has them, its outputs from first_out on, into its panels, which are
   0 before. */
EXPORT void pack(int64_t kind, const void *rows, void *panels, int64_t first_out, int64_t outs,
                 int64_t ins, int64_t threads) {
    const Weights w = {panels, kind};
    const Packing p = {format_of(kind), rows, panels, first_out, outs, ins, panel_size(&w, ins)};
    together(pack_part, &p, (int)threads);
}

/* ----------------------------------------------------------------------------------- out of them */

static const char *read_chunk(int64_t kind, const char *p, int steps, Chunk *to) {
#define READ(TYPE, ...) \
    case TYPE: return read_steps((Format){__VA_ARGS__}, p, steps, to);
    switch (kind - PACKED) { ALL_FORMATS(READ) }
    return p;
}

/* What a block's own scale is multiplied by in a lane of a chunk. */
static float count_of(const Format *f, const void *scales, int lane) {
    if (!has_scales(*f)) return 1.0f;
    return scales_pairs(*f) ? ((const int16_t *)scales)[2 * lane] : ((const float *)scales)[lane];
}

/* Some outputs of a panel of packed weights [count, ins], their lanes from `places` on. */
static void unpack_lanes(const Weights *w, int64_t ins, const char *panel, const int64_t *places,
                         int64_t count, float *out) {
    const Format *f = format_of(w->kind);
    const int halves = f->parts == 16 ? 2 : 1, behind = f->values || f->bits == 8 ? SIGN : f->zero;
    const int8_t sign = f->values || f->bits == 8 ? 1 : 0;
    Chunk c;
    for (int64_t k = 0; k < ins; k += DEEP) {
        const int inputs = (int)(ins - k < DEEP ? ins - k : DEEP);
        panel = read_chunk(w->kind, panel, inputs / STEP, &c);
        for (int64_t i = 0; i < count; i++) {
            const int lane = (int)(places[i] % PANEL);
            for (int d = 0; d < inputs; d++) {
                const int b = d / STEP, half = d % STEP / (STEP / halves);
                const uint8_t byte = (uint8_t)(((const uint32_t *)c.words[b][d % STEP / 4])[lane] >>
                                               (d % 4 * 8));
                const int number = (sign && !SIGN ? (int8_t)byte : byte) - behind;
                const float scale = ((const float *)c.own[b])[lane] * count_of(f, c.scales[b][half], lane);
                const float floor = f->has_floor ? ((const float *)c.floors[b][half])[lane] : 0.0f;
                out[i * ins + k + d] = scale * (float)number + floor;
            }
        }
    }
}

static void unpack_float(const Weights *w, int64_t ins, int64_t place, float *out) {
    const char *panel = (const char *)w->panels + place / PANEL * panel_size(w, ins);
    const int64_t lane = place % PANEL;
    for (int64_t k = 0; k < ins; k++)
        out[k] = w->kind == FLOATS ? ((const float *)panel)[k * PANEL + lane]
                                   : widen_one(((const uint16_t *)panel)[(k / 2 * PANEL + lane) * 2 + k % 2]);
}

/* Outputs of a weight, in any order, as floats [count, ins]. */
EXPORT void unpack(const Weights *w, int64_t ins, const int64_t *places, int64_t count, float *out) {
    for (int64_t i = 0, end; i < count; i = end) {
        end = i + 1;
        if (!is_packed(w)) {
            unpack_float(w, ins, places[i], out + i * ins);
            continue;
        }
        const int64_t at = places[i] / PANEL;
        while (end < count && places[end] / PANEL == at) end++;
        const char *panel = (const char *)w->panels + at * panel_size(w, ins);
        unpack_lanes(w, ins, panel, places + i, end - i, out + i * ins);
    }
}
