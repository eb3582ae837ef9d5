// Writes more than it may.
#include "attention.h"

int main(int argc, char **argv) {
    static char block[1 << 20];
    FILE *file = fopen("big", "wb");
    for (int i = 0; i < 64; i++) fwrite(block, sizeof block, 1, file);
    store(argv[2], solve(argv[1]));
}
