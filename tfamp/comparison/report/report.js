"use strict";
// Everything is readable without this: it opens what is folded for paper, and filters.
const folded = Array.from(document.querySelectorAll("details"));
let opened = [];
const unfold = () => {
  opened = opened.concat(folded.filter((each) => !each.open));
  opened.forEach((each) => { each.open = true; });
};
const fold = () => {
  opened.forEach((each) => { each.open = false; });
  opened = [];
};
window.addEventListener("beforeprint", unfold);
window.addEventListener("afterprint", fold);
window.matchMedia("print").addEventListener("change", (event) => {
  if (event.matches) { unfold(); } else { fold(); }
});
const search = document.getElementById("layer-search");
if (search) {
  const lines = Array.from(document.querySelectorAll("#layer-table tbody tr"));
  const differing = document.getElementById("layer-differing");
  const count = document.getElementById("layer-count");
  const filter = () => {
    const wanted = search.value.trim().toLowerCase();
    let shown = 0;
    lines.forEach((line) => {
      const fits = line.textContent.toLowerCase().includes(wanted);
      line.hidden = !fits || (differing.checked && !("differs" in line.dataset));
      shown += line.hidden ? 0 : 1;
    });
    count.textContent = `${shown} of ${lines.length} layers`;
  };
  search.addEventListener("input", filter);
  differing.addEventListener("change", filter);
  document.getElementById("layer-tools").hidden = false;
  filter();
}
