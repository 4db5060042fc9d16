/* Copyright: gpufleet.driver contributors
 * GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
 * SPDX-License-Identifier: GPL-3.0-or-later
 *
 * The floor of any census of open files: read every link under /proc/PID/fd, compare nothing. */
#define _GNU_SOURCE
#include <ctype.h>
#include <dirent.h>
#include <stdio.h>
#include <unistd.h>

int main(void)
{
	char path[64], target[4096];
	long links = 0;
	struct dirent *process, *file;
	DIR *proc = opendir("/proc");

	while (proc && (process = readdir(proc))) {
		if (!isdigit((unsigned char)process->d_name[0]))
			continue;
		snprintf(path, sizeof path, "/proc/%s/fd", process->d_name);
		DIR *files = opendir(path);
		if (!files)
			continue;
		while ((file = readdir(files)))
			if (file->d_name[0] != '.' && readlinkat(dirfd(files), file->d_name, target, sizeof target) > 0)
				links++;
		closedir(files);
	}
	printf("%ld links\n", links);
	return 0;
}
