/* Common beginning of the programs here. */
#include <errno.h>
#include <rdmux_dsm.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Ends the program if a condition does not hold. */
#define CHECK(holds) \
	do { \
		if (!(holds)) { \
			fprintf(stderr, "%s:%d: %s (last error: %s)\n", __FILE__, __LINE__, #holds, rdmux_dsm_error()); \
			exit(1); \
		} \
	} while (0)

/* Milliseconds after which a node is not waited for any more. */
enum { LONG_MS = 60000 };
