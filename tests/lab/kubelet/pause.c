// Copyright: gpufleet.driver contributors
// GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
// SPDX-License-Identifier: GPL-3.0-or-later

// What containerd runs in each pod beside its containers.
#include <unistd.h>

int main(void)
{
	for (;;)
		pause();
}
