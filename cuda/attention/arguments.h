// The arguments of every attention kernel, passed by value: one struct, in C and in C++, packed in one place
// (flashcli/kernels/arguments.py), whose size each build asserts and whose fields a test compares.
#pragma once
#ifdef __cplusplus
#include "numbers.cuh"
#else
typedef float Input, Answer;
#endif

// Element (b, h, i, x) of a matrix is at data[b * batch + h * head + i * row + x]: batch, head, row, column; in numbers.
typedef struct {
    long long batch, head, row;
} Strides;

typedef struct {
    const Input *Q, *K, *V;    // Q [B, H, M, d]; K and V [B, Hkv, N, d]
    Answer *O;                 // [B, H, M, d]
    float *lse;                // natural logarithm of each row's sum of exponentials, [B, H, M]; or null
    const float *bias;         // added to scale * Q Kᵀ (BIAS & 1)
    unsigned char *workspace;  // scratch of the size the registry asks for; null for most kernels
    int *nonfinite;            // set to 1 by find_nonfinite where an input holds NaN or Inf
    Strides q, k, v, o;        // ALIGNED: multiples of 4, as are the matrices' addresses in numbers
    Strides bias_strides;      // of [B, H, M, N], in elements; 0 where it is broadcast
    long long bias_column;
    int B, H, Hkv, M, N;  // Hkv divides H: H / Hkv heads of Q share one of K and V
    int q_start;          // the position of Q's first row in the sequence: where the causal mask lets it look
    float scale;          // factor on Q Kᵀ, usually 1/sqrt(d)
    int tile_i, tile_j;   // the pair of tiles that the launch is for, where one launch does not take them all; else 0
    int chunk;            // how many tiles of keys are taken together, where a row's keys are cut; else 0
    const unsigned char *mask;  // 0 where a key is taken away from a query (BIAS & 2)
    Strides mask_strides;       // of [B, H, M, N], in bytes; 0 where it is broadcast
    long long mask_column;
    const float *slopes;  // of ALiBi, [B, H]: slope * |position + i - j| is taken from scores (BIAS & 4)
    long long slopes_batch, slopes_head;
    const int *q_starts, *k_starts;  // where S packed sequences start in Q and K, S + 1 each (PACKED)
    int first, position;             // query i sees keys from first + i on (WINDOW), and is at position + i
    int S, tokens, key_tokens;       // PACKED: the rows of Q and of K of all sequences; to a block, M and N are of one
    int sequence, first_row, first_key, tile;  // of a block: its sequence, where that begins, and its tile there
} Attention;
