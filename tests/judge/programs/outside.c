// Writes a file outside of its folder. TARGET is its path.
#include "attention.h"

int main(int argc, char **argv) {
    FILE *file = fopen(TARGET, "w");
    if (!file) return 6;
    fputs("I was here", file);
    fclose(file);
    store(argv[2], solve(argv[1]));
}
