// Shared by every kernel of paged decode: its argument, the macros it is built with, and where numbers are and how
// they are stored.
//
// Macros, set by flashcli/kernels/decode.py so that launch and kernel cannot disagree:
//   HEAD_DIM    D, a multiple of 8 up to 256            PAGE        tokens a page has room for, a power of two
//   QUERY_TYPE  of queries and answers: FP32, FP16, BF16  CACHE_TYPE  of keys and values: the query's, E4M3, E5M2, INT8
//   TRANSPOSED  1: vLLM's layout, where a page of values is [D][PAGE]; 0: a token's D numbers stand together
//   THREADS     threads in a block                       ROWS        query rows that a block takes together
// and others that are 0 where they are not given, of which the first three are 1 where they are:
//   RAGGED      each sequence has query tokens of its own number, which query_starts tell
//   SOFTCAP     scores have a bound                      SINKS       each head has one more score
//   SHORT       only sequences of up to so many query tokens are answered; blocks are for so many of each sequence
//   TILED       1, of tensor: blocks find row tiles of sequences with any number of query tokens, see work.cuh
//   BY_ROWS     1, with TILED: warps have rows of their own, and all keys of a piece
#pragma once

#ifndef HEAD_DIM
#error "HEAD_DIM, PAGE, QUERY_TYPE, CACHE_TYPE, TRANSPOSED, THREADS and ROWS are macros: see flashcli/kernels/decode.py"
#endif
#include "common.cuh"
#include "numbers.cuh"

#ifndef RAGGED
#define RAGGED 0
#endif
#ifndef SOFTCAP
#define SOFTCAP 0
#endif
#ifndef SINKS
#define SINKS 0
#endif
#ifndef SHORT
#define SHORT 0
#endif
#ifndef TILED
#define TILED 0
#endif
#ifndef BY_ROWS
#define BY_ROWS 0
#endif

// How the copy engine finds boxes of an array, in the driver's form; see flashcli/kernels/boxes.py. It must lie on 64
// bytes. That is not declared: the argument would then begin after a gap, which PyCUDA leaves out.
struct BoxMap {
    unsigned char of[128];
};

// The one argument of every __global__ function, by value. Strides are in numbers, not bytes; null pointers stand for
// what was not given. A row is a query token t and a head: the rows of a head of the cache are t * group + head %
// group.
struct Decode {
    const void *query;        // [S, T, H, D], or RAGGED [total, 1, H, D]; heads follow each other, sequences and tokens
                              // are strides apart
    const void *key_cache;    // a page, a head and a slot are strides apart, and within a slot the chunks of 16 bytes
    const void *value_cache;  // the same; but with TRANSPOSED one number of a slot is PAGE numbers after the one before
    const int *block_tables;  // [S, table_width]; rows are a stride apart
    const int *seq_lens;      // [S]
    const float *alibi_slopes;  // [H], or null
    const float *k_scale;       // one number, or null for 1
    const float *v_scale;       // the same
    const int *query_starts;    // [S + 1] with RAGGED: the first query token of each sequence
    const float *sinks;         // [H] with SINKS: a score of each head without a key
    void *out;                  // as the query, without gaps
    float *lse;                 // the same without D
    void *workspace;            // scratch of the size that the registry asks for, zeroed once
    long long query_sequence, query_token, table_row;
    long long key_page, key_head, key_slot, key_chunk;
    long long value_page, value_head, value_slot;
    int sequences, tokens, heads, kv_heads, group, pages, table_width;     // group: heads / kv_heads, without dividing
    int window;                                                            // tokens that a query token sees; 0: all
    int sparse_stride, sparse_block, sparse_local, sparse_slide, tp_rank;  // block-sparse if sparse_stride > 1
    int total;                                                             // query tokens of all sequences
    int causal;                                                            // with RAGGED: 0, all see all
    int pass, passes, together;                                            // of 07_gather.cu
    float scale;
    float softcap;  // with SOFTCAP: the bound
    int unused[10];
    BoxMap key_boxes, value_boxes;  // of prompt, with BOXES
};
constexpr int ARGUMENT = 0x210;  // where it begins on Hopper, in the constant bank
static_assert((ARGUMENT + sizeof(Decode) - 2 * sizeof(BoxMap)) % 64 == 0, "maps lie on 64 bytes");

// ---- types

#define FP32 0  // macros, since #if knows no enumerators
#define FP16 1
#define BF16 2
#define E4M3 3
#define E5M2 4
#define INT8 5

#define CONVERTS_FP8 (__CUDA_ARCH__ >= 890)  // by an instruction; on GPUs before Ada it is done by hand

__host__ __device__ constexpr int bytes_of(int type) { return type == FP32 ? 4 : type <= BF16 ? 2 : 1; }

constexpr int CACHE_BYTES = bytes_of(CACHE_TYPE);
constexpr int VECTOR_BYTES =
    HEAD_DIM * CACHE_BYTES % 16 == 0 ? 16 : 8;  // loaded at a time: as much as rows are aligned to
constexpr int X = VECTOR_BYTES / CACHE_BYTES;   // numbers in it
constexpr int CHUNKS = HEAD_DIM / X;            // such vectors in a row

static_assert(HEAD_DIM % 8 == 0 && HEAD_DIM <= 256, "rows are read 8 or 16 bytes at a time");
static_assert((PAGE & (PAGE - 1)) == 0, "a power of two");
static_assert(!TRANSPOSED || VECTOR_BYTES == 16, "vLLM's chunks of keys have 16 bytes");
static_assert(CACHE_TYPE == QUERY_TYPE || CACHE_TYPE >= E4M3, "the cache has the query's type, fp8 or int8");

constexpr float LN2 = 0.69314718055994530942f;

// The low or the high half of a word, which an instruction can name: shifting the high one down would take another.
__device__ __forceinline__ unsigned short half_of(unsigned word, int which) {
    unsigned short low, high;
    asm("mov.b32 {%0, %1}, %2;" : "=h"(low), "=h"(high) : "r"(word));
    return which == 0 ? low : high;
}

// A number of E4M3 by hand: its digits, read as a half's, are 2^-8 of it; but the largest one means NaN.
__device__ __forceinline__ float from_e4m3_by_hand(unsigned bits) {
    const float x = from_half((bits & 0x80) << 8 | (bits & 0x7f) << 7) * 256;
    return fabsf(x) == 480 ? __int_as_float(0x7fffffff) : x;
}

// Two of a word's four fp8 numbers as two halves, the first in the low bits. Every fp8 number is a half too: nothing is
// rounded.
__device__ __forceinline__ unsigned halves_of_fp8(unsigned word, int which) {
    unsigned y = 0;
#if CACHE_TYPE == E4M3 && CONVERTS_FP8
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(y) : "h"(half_of(word, which)));
#elif CACHE_TYPE == E5M2 && CONVERTS_FP8
    asm("cvt.rn.f16x2.e5m2x2 %0, %1;" : "=r"(y) : "h"(half_of(word, which)));
#else
    const unsigned pair = half_of(word, which), first = pair & 0xff, second = pair >> 8;
    if (CACHE_TYPE == E5M2) y = first << 8 | second << 24;
    else y = bits_of_half(from_e4m3_by_hand(first)) | bits_of_half(from_e4m3_by_hand(second)) << 16;
#endif
    return y;
}

// Two of its four numbers of int8, exactly too: with its sign bit turned over, one is 128 more; as the last byte of 1024
// it is a half.
__device__ __forceinline__ unsigned halves_of_int8(unsigned word, int which) {
    unsigned y;
    const unsigned more = __byte_perm(word ^ 0x80808080, 0x64646464, which == 0 ? 0x4140 : 0x4342);
    asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(y) : "r"(more), "r"(0x64806480));
    return y;
}

// Two floats as 16-bit numbers of the query's type, the first in the low bits.
__device__ __forceinline__ unsigned pack(float low, float high) {
    unsigned y;
#if QUERY_TYPE == FP16
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
#else
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
#endif
    return y;
}

// Two of a word's four numbers of fp8 or int8 as 16-bit numbers of the query's type: exact in either.
__device__ __forceinline__ unsigned widened(unsigned word, int which) {
    const unsigned halves = CACHE_TYPE == INT8 ? halves_of_int8(word, which) : halves_of_fp8(word, which);
    return QUERY_TYPE == FP16 ? halves : pack(from_half(halves & 0xffff), from_half(halves >> 16));
}

// One of a word's four numbers of int8, 128 more as the last byte of 2^23. An instruction that converts takes longer.
__device__ __forceinline__ float from_int8(unsigned word, int which) {
    return __uint_as_float(__byte_perm(word ^ 0x80808080, 0x4b000000, 0x7650 + which)) - 8388736.0f;
}

// N numbers of the cache in their words, as floats.
template <int N>
__device__ __forceinline__ void unpack(const unsigned *words, float (&x)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
        if (CACHE_TYPE == FP32) x[i] = __uint_as_float(words[i]);
        else if (CACHE_TYPE == FP16) x[i] = from_half(words[i / 2] >> i % 2 * 16);
        else if (CACHE_TYPE == BF16) x[i] = __uint_as_float(i % 2 ? words[i / 2] & 0xffff0000 : words[i / 2] << 16);
        else if (CACHE_TYPE == INT8) x[i] = from_int8(words[i / 4], i % 4);
        else if (CACHE_TYPE == E4M3 && !CONVERTS_FP8) x[i] = from_e4m3_by_hand(words[i / 4] >> i % 4 * 8);
        else x[i] = from_half(halves_of_fp8(words[i / 4], i % 4 / 2) >> i % 2 * 16);
    }
}

// BYTES from global memory into words: 1, 2, 4, 8 or 16.
template <int BYTES>
struct Words {
    unsigned word[BYTES < 4 ? 1 : BYTES / 4];
};
template <int BYTES>
__device__ __forceinline__ Words<BYTES> load(const unsigned char *from) {
    Words<BYTES> to;
    if constexpr (BYTES == 16) {
        const uint4 x = __ldg(reinterpret_cast<const uint4 *>(from));
        to.word[0] = x.x, to.word[1] = x.y, to.word[2] = x.z, to.word[3] = x.w;
    } else if constexpr (BYTES == 8) {
        const uint2 x = __ldg(reinterpret_cast<const uint2 *>(from));
        to.word[0] = x.x, to.word[1] = x.y;
    } else if constexpr (BYTES == 4) to.word[0] = __ldg(reinterpret_cast<const unsigned *>(from));
    else if constexpr (BYTES == 2) to.word[0] = __ldg(reinterpret_cast<const unsigned short *>(from));
    else to.word[0] = __ldg(from);
    return to;
}

__device__ __forceinline__ float query_number(const Decode &a, long long at) {
    if (QUERY_TYPE == FP32) return static_cast<const float *>(a.query)[at];
    const unsigned bits = static_cast<const unsigned short *>(a.query)[at];
    return QUERY_TYPE == FP16 ? from_half(bits) : from_bfloat16(bits);
}

// A number as one of 16 bits of the query's type.
__device__ __forceinline__ unsigned bits_of_answer(float x) {
    return QUERY_TYPE == FP16 ? bits_of_half(x) : bits_of_bfloat16(x);
}

__device__ __forceinline__ void store_answer(const Decode &a, long long at, float x) {
    if (QUERY_TYPE == FP32) static_cast<float *>(a.out)[at] = x;
    else static_cast<unsigned short *>(a.out)[at] = bits_of_answer(x);
}

// ---- where things are

// A sequence as a block sees it, with one head of the cache and the rows from row0 on. A length that its row of the
// table has no room for is cut to it: memory that is not the table's is never read.
struct Sequence {
    int s, kv_head, row0, length;
    const int *table;
#if TILED
    int start, tokens;  // its query tokens among those of all
#endif
};

__device__ __forceinline__ int rows_of(const Decode &a) { return a.tokens * a.group; }

// The longest sequence that the tables have room for.
__device__ __forceinline__ long long room_of(const Decode &a) { return (long long)a.table_width * PAGE; }

// With RAGGED, each query token is an asker: a sequence of its own, which ends with it and has the table of the one
// that it is of. So it is computed as if it were alone, and has the same bytes. Else askers are the sequences.
__device__ __forceinline__ int askers(const Decode &a) { return RAGGED ? a.total : a.sequences; }

// The sequence that a query token is of: the last one that starts at it or before. -1 or S if it is of none. First it
// looks where a single token of each sequence would be: a search takes several times as long.
__device__ __forceinline__ int owner_of(const Decode &a, int token) {
    if (token < a.sequences && __ldg(a.query_starts + token) <= token && __ldg(a.query_starts + token + 1) > token)
        return token;
    int low = -1, high = a.sequences + 1;  // that starts at or before the token, and that starts behind it
    while (high - low > 1) {
        const int middle = low + (high - low) / 2;
        if (__ldg(a.query_starts + middle) <= token) low = middle;
        else high = middle;
    }
    return low;
}

// The asker that blocks with a number are for. With SHORT, where numbers s * SHORT and on are query tokens of sequence s,
// it is -1 where the sequence has more of them, or not so many.
__device__ __forceinline__ int asker_with(const Decode &a, int number) {
    if (SHORT == 0) return number;
    const int s = number / larger(SHORT, 1), start = a.query_starts[s], end = a.query_starts[s + 1];
    const int token = start + number % larger(SHORT, 1);
    const bool is_there = token < end && (long long)end - start <= SHORT && token >= 0 && token < a.total;
    return is_there ? token : -1;
}

// How many tokens an asker sees, but for windows: none if it is no sequence's.
__device__ __forceinline__ int length_of(const Decode &a, int s) {
#if RAGGED
    const int owner = owner_of(a, s);
    if (owner < 0 || owner >= a.sequences) return 0;
    const long long length = min((long long)max(a.seq_lens[owner], 0), room_of(a));
    return a.causal ? (int)max(0LL, length - max(0, a.query_starts[owner + 1] - 1 - s)) : (int)length;
#else
    return min((long long)max(a.seq_lens[s], 0), room_of(a));
#endif
}

// Where the pages of an asker stand.
__device__ __forceinline__ const int *table_of(const Decode &a, int s) {
#if RAGGED
    s = min(max(owner_of(a, s), 0), a.sequences - 1);
#endif
    return a.block_tables + s * a.table_row;
}

__device__ __forceinline__ Sequence sequence_of(const Decode &a, int s, int kv_head, int row0) {
    return {s, kv_head, row0, length_of(a, s), table_of(a, s)};
}

// The page of a token. Products of it need 64 bits: a cache may have more than 2^31 numbers. A page that the cache has
// not is replaced by one that it has.
__device__ __forceinline__ long long page_of(const Decode &a, const Sequence &of, int token) {
    const int page = __ldg(of.table + token / PAGE);
    return (unsigned)page < (unsigned)a.pages ? page : 0;
}

__device__ __forceinline__ const unsigned char *key_of(const Decode &a, const Sequence &of, int token) {
    const long long at = page_of(a, of, token) * a.key_page + of.kv_head * a.key_head + token % PAGE * a.key_slot;
    return static_cast<const unsigned char *>(a.key_cache) + at * CACHE_BYTES;
}

__device__ __forceinline__ const unsigned char *value_of(const Decode &a, const Sequence &of, int token) {
    const long long at = page_of(a, of, token) * a.value_page + of.kv_head * a.value_head + token % PAGE * a.value_slot;
    return static_cast<const unsigned char *>(a.value_cache) + at * CACHE_BYTES;
}

// ---- who sees what

__device__ __forceinline__ int token_of_row(const Decode &a, int row) {
    return a.tokens > 1 ? (unsigned)row / (unsigned)a.group : 0;  // dividing takes a while
}
__device__ __forceinline__ int head_of_row(const Decode &a, int kv_head, int row) {
    return (kv_head - token_of_row(a, row)) * a.group + row;
}

// The place of a row's query token in its sequence: the query tokens are the last ones.
__device__ __forceinline__ int position_of_row(const Decode &a, const Sequence &of, int row) {
    return of.length - a.tokens + token_of_row(a, row);
}

// The first token that any query token of the sequence sees.
__device__ __forceinline__ int first_used(const Decode &a, int length) {
    return a.window ? max(0, length - a.tokens + 1 - a.window) : 0;
}

// By how many blocks a head's pattern of block-sparse attention is shifted.
__device__ __forceinline__ long long slides_of(const Decode &a, int head, int kv_head) {
    return a.sparse_slide >= 0 ? ((long long)a.tp_rank * a.heads + head) * a.sparse_slide
                               : ((long long)a.tp_rank * a.kv_heads + kv_head) * -(long long)a.sparse_slide;
}

__device__ __forceinline__ bool sees(const Decode &a, const Sequence &of, int row, int token) {
    const int position = position_of_row(a, of, row);
    if (token > position || (a.window && position - token >= a.window)) return false;
    if (a.sparse_stride <= 1) return true;
    const int block = token / a.sparse_block;
    if (block > position / a.sparse_block - a.sparse_local) return true;
    return (block + slides_of(a, head_of_row(a, of.kv_head, row), of.kv_head) + 1) % a.sparse_stride == 0;
}

// ---- scores

// The factor on products of queries and keys, of which `score_of` makes scores in powers of two.
__device__ __forceinline__ float factor_of(const Decode &a) {
    const float factor = a.scale * (a.k_scale ? *a.k_scale : 1.0f);
    return SOFTCAP ? factor / a.softcap : factor * LOG2E;
}
__device__ __forceinline__ float score_of(const Decode &a, float product) {
    return SOFTCAP ? a.softcap * LOG2E * tanhf(product) : product;
}

// Where a row's answer goes: its place among [S, T, H], times D for that in `out`.
__device__ __forceinline__ long long place_of_row(const Decode &a, const Sequence &of, int row) {
    return ((long long)of.s * a.tokens + token_of_row(a, row)) * a.heads + head_of_row(a, of.kv_head, row);
}
