// Right, after printing 10 GB.
#include "attention.h"

int main(int argc, char **argv) {
    static char block[1 << 20];
    memset(block, 'x', sizeof block);
    for (int i = 0; i < 10000; i++) {
        if (write(1, block, sizeof block) < 0) return 5;
    }
    store(argv[2], solve(argv[1]));
}
