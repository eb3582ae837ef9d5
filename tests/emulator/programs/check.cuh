#pragma once
#include <cstdio>
#include <cstdlib>

#define CHECK(call)                                                                        \
    {                                                                                      \
        cudaError_t error = call;                                                          \
        if (error != cudaSuccess) {                                                        \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, cudaGetErrorString(error)); \
            exit(EXIT_FAILURE);                                                            \
        }                                                                                  \
    }
