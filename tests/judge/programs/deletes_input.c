// Right, but deletes its input afterwards.
#include "attention.h"

int main(int argc, char **argv) {
    struct problem p = solve(argv[1]);
    unlink(argv[1]);
    store(argv[2], p);
}
