// Ends with an exit code, after saying why.
#include "attention.h"

int main(int argc, char **argv) {
    puts("\033[31mno GPU\033[0m found");
    return 3;
}
