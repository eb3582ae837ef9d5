// The homework in plain C: what the programs in this folder do right, apart from the one thing each does wrong.
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

struct problem {
    int B, N, d;
    float *qkv, *o;
};

static struct problem load(const char *path) {
    struct problem p;
    FILE *file = fopen(path, "rb");
    if (!file || fread(&p, sizeof(int), 3, file) != 3) exit(3);
    size_t count = (size_t)p.B * p.N * p.d;
    p.qkv = malloc(3 * count * sizeof(float));
    p.o = calloc(count, sizeof(float));
    if (fread(p.qkv, sizeof(float), 3 * count, file) != 3 * count) exit(3);
    fclose(file);
    return p;
}

static void attend(const float *q, const float *k, const float *v, float *o, int N, int d) {
    float *s = malloc(N * sizeof(float));
    for (int i = 0; i < N; i++) {
        float m = -INFINITY, l = 0;
        for (int j = 0; j < N; j++) {
            s[j] = 0;
            for (int x = 0; x < d; x++) s[j] += q[i * d + x] * k[j * d + x];
            s[j] /= sqrtf(d);
            m = fmaxf(m, s[j]);
        }
        for (int j = 0; j < N; j++) {
            float p = expf(s[j] - m);
            l += p;
            for (int x = 0; x < d; x++) o[i * d + x] += p * v[j * d + x];
        }
        for (int x = 0; x < d; x++) o[i * d + x] /= l;
    }
    free(s);
}

static struct problem solve(const char *path) {
    struct problem p = load(path);
    for (int b = 0; b < p.B; b++) {
        size_t n = (size_t)p.N * p.d;
        const float *q = p.qkv + 3 * b * n;
        attend(q, q + n, q + 2 * n, p.o + b * n, p.N, p.d);
    }
    return p;
}

static void store(const char *path, struct problem p) {
    FILE *file = fopen(path, "wb");
    if (!file) exit(4);
    fwrite(p.o, sizeof(float), (size_t)p.B * p.N * p.d, file);
    fclose(file);
}
