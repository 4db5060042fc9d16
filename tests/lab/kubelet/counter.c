// Copyright: gpufleet.driver contributors
// GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
// SPDX-License-Identifier: GPL-3.0-or-later

// Work that can be seen to go on: it counts in its memory, and adds each number to a file.
#include <stdio.h>
#include <unistd.h>

int main(void)
{
	for (long count = 0;; count++) {
		FILE *file = fopen("/data/count", "a");
		if (file) {
			fprintf(file, "%ld\n", count);
			fclose(file);
		}
		usleep(50000);
	}
}
