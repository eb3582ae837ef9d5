// Does the homework.
#include "attention.h"

int main(int argc, char **argv) {
    store(argv[2], solve(argv[1]));
}
