// SPDX-License-Identifier: Apache-2.0
// Applies the chosen colours before the page is first painted; no module, since modules run later.
try {
  document.documentElement.dataset.theme = JSON.parse(localStorage.getItem("hf_triton.settings"))?.theme ?? "system";
} catch {} // no storage, or not ours: the system's colours
