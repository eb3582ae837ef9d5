// One element is off by 0.01: row 5, column 7 of the last batch.
#include "attention.h"

int main(int argc, char **argv) {
    struct problem p = solve(argv[1]);
    p.o[((size_t)(p.B - 1) * p.N + 5) * p.d + 7] += 0.01f;
    store(argv[2], p);
}
