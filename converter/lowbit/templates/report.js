"use strict";
(() => {
  const table = document.getElementById("nodes");
  const bodies = [...table.tBodies];
  const filter = document.getElementById("filter");
  const outcome = document.getElementById("outcome"); // not on every page
  const what = table.dataset.what ?? "nodes";
  const count = document.getElementById("count");

  // ---- rows that open
  function setOpen(body, open) {
    const detail = body.querySelector(".detail");
    if (!detail) return;
    detail.hidden = !open;
    body.querySelector(".title button").setAttribute("aria-expanded", open);
  }
  for (const body of bodies) {
    const detail = body.querySelector(".detail");
    if (!detail) continue;
    const title = body.querySelector(".title");
    const button = document.createElement("button");
    button.type = "button";
    button.append(...title.childNodes);
    title.append(button);
    body.rows[0].classList.add("opens");
    body.rows[0].addEventListener("click", () => {
      if (getSelection().isCollapsed) setOpen(body, detail.hidden);
    });
    setOpen(body, false);
  }

  // ---- filter
  function applyFilter() {
    const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
    const wanted = outcome?.value;
    let shown = 0;
    for (const body of bodies) {
      const kind = body.dataset.outcome;
      const fits = !wanted || (wanted[0] === "-" ? kind !== wanted.slice(1) : kind === wanted);
      body.hidden = !(fits && words.every((word) => body.dataset.search.includes(word)));
      shown += !body.hidden;
    }
    count.textContent = `${shown} of ${bodies.length} ${what}`;
  }
  filter.addEventListener("input", applyFilter);
  outcome?.addEventListener("input", applyFilter);
  applyFilter();

  // ---- sort: numbers start with the largest unless the column says otherwise, texts with the first letter
  const heads = [...table.tHead.rows[0].cells];
  const select = document.getElementById("sort");
  function valueOf(body, column) {
    const cell = body.rows[0].cells[column];
    return "value" in cell.dataset ? Number(cell.dataset.value) : cell.textContent.trim();
  }
  function sort(column, descending) {
    const sign = descending ? -1 : 1;
    const keyed = bodies.map((body) => [valueOf(body, column), body]);
    keyed.sort(([a], [b]) => sign * (typeof a === "number" ? a - b : a.localeCompare(b, undefined, { numeric: true })));
    table.append(...keyed.map(([, body]) => body));
    heads.forEach((head, i) => {
      if (i === column) head.setAttribute("aria-sort", descending ? "descending" : "ascending");
      else head.removeAttribute("aria-sort");
    });
    select.value = column;
  }
  const falls = (head) =>
    head.classList.contains("num") && head.dataset.key !== "index" && head.dataset.first !== "ascending";
  const sorted = heads.some((head) => head.hasAttribute("aria-sort"));
  heads.forEach((head, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      const now = head.getAttribute("aria-sort");
      sort(column, now ? now === "ascending" : falls(head));
    });
    select.add(new Option(column === 0 ? "order in the model" : button.textContent, column));
    if (column === 0 && !sorted) head.setAttribute("aria-sort", "ascending");
  });
  select.value = heads.findIndex((head) => head.hasAttribute("aria-sort"));
  select.addEventListener("input", () => {
    const head = heads[select.value];
    sort(Number(select.value), falls(head));
  });

  // ---- chart: tips, arrow keys, and the way to a node's row
  const tip = document.getElementById("tip");
  const bands = [...document.querySelectorAll(".band")];
  function showTip(band) {
    tip.textContent = band.getAttribute("aria-label");
    tip.hidden = false;
    const at = band.getBoundingClientRect();
    const box = tip.getBoundingClientRect();
    const left = Math.min(Math.max(8, at.left + at.width / 2 - box.width / 2), innerWidth - box.width - 8);
    const above = at.top - box.height - 6;
    tip.style.left = `${left}px`;
    tip.style.top = `${above >= 4 ? above : Math.min(at.bottom + 6, innerHeight - box.height - 4)}px`;
  }
  function hideTip() {
    tip.hidden = true;
  }
  function goTo(band) {
    const body = document.getElementById(`node-${band.dataset.row}`);
    filter.value = "";
    if (outcome) outcome.selectedIndex = 0;
    applyFilter();
    document.querySelector(".marked")?.classList.remove("marked");
    body.classList.add("marked");
    setOpen(body, true);
    body.scrollIntoView({ block: "start" });
  }
  bands.forEach((band, i) => {
    band.addEventListener("pointerenter", () => showTip(band));
    band.addEventListener("pointerleave", hideTip);
    band.addEventListener("focus", () => showTip(band));
    band.addEventListener("blur", hideTip);
    band.addEventListener("click", () => goTo(band));
    band.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (event.key === "Enter" || event.key === " ") goTo(band);
      else if (step && bands[i + step]) {
        band.tabIndex = -1;
        bands[i + step].tabIndex = 0;
        bands[i + step].focus();
      } else return;
      event.preventDefault();
    });
  });
  addEventListener("scroll", hideTip, { passive: true });
})();
