// Theme, time zone, keyboard shortcuts and relative times. Everything else is HTML and htmx.
(() => {
  const root = document.documentElement;
  const one = (selector) => document.querySelector(selector);
  const all = (selector) => [...document.querySelectorAll(selector)];
  const savedTheme = localStorage.getItem("timebell-theme");
  if (savedTheme) root.dataset.theme = savedTheme;

  // The server formats times, so it needs the zone of this browser.
  const zone = Intl.DateTimeFormat().resolvedOptions().timeZone;
  if (zone) {
    document.cookie = `timebell-timezone=${zone}; path=/ui; max-age=31536000; samesite=lax`;
    all("button[name=zone][hidden]").forEach((button) => { button.hidden = false; });
  }

  // Show the field that a refused form has to correct.
  const invalid = one("[aria-invalid]");
  invalid?.closest("details")?.setAttribute("open", "");
  invalid?.focus();

  const open = (dialog) => { if (dialog && !dialog.open) dialog.showModal(); };
  const palette = () => { open(one("#palette")); one("#palette input")?.focus(); };
  document.addEventListener("click", (event) => {
    const button = event.target.closest("[data-act]");
    if (!button) return;
    if (button.dataset.act === "theme") {
      const systemTheme = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
      root.dataset.theme = (root.dataset.theme || systemTheme) === "dark" ? "light" : "dark";
      localStorage.setItem("timebell-theme", root.dataset.theme);
    }
    if (button.dataset.act === "palette" && window.htmx) { event.preventDefault(); palette(); }
    if (button.dataset.act === "keys") open(one("#keys"));
    if (button.dataset.act === "copy") {
      navigator.clipboard?.writeText(button.dataset.text).then(() => {
        button.classList.add("done");
        setTimeout(() => button.classList.remove("done"), 1500);
      });
    }
  });
  // A menu closes when the user clicks elsewhere or presses Escape.
  const closeMenus = (except) => all(".pop[open], .tabbar details[open]").forEach((menu) => {
    if (menu !== except) menu.open = false;
  });
  document.addEventListener("click", (event) => closeMenus(event.target.closest(".pop, .tabbar details")));
  document.addEventListener("change", (event) => {
    if (event.target.matches("[data-submit]")) event.target.form.requestSubmit();
    if (event.target.matches("[data-all]")) {
      all('input[form="several"]').forEach((checkbox) => { checkbox.checked = event.target.checked; });
    }
  });
  // Ask for confirmation before forms and buttons with data-confirm, followed by the texts of the elements that
  // data-confirm-with selects, or with these texts alone; without scripts they are sent directly.
  document.addEventListener("submit", (event) => {
    const button = event.submitter?.dataset ?? {};
    const data = button.confirm || button.confirmWith ? button : event.target.dataset;
    const details = data.confirmWith ? all(data.confirmWith).map((element) => element.innerText) : [];
    const text = [data.confirm, ...details].filter(Boolean).join("\n");
    if (text && !window.confirm(text)) event.preventDefault();
  });

  let goPressedAt = 0;
  const destinations = {
    o: "/ui/", s: "/ui/schedules", j: "/ui/jobs", d: "/ui/dead-letters", c: "/ui/campaigns", t: "/ui/triggers",
    f: "/ui/forecast", a: "/ui/audit", n: "/ui/nodes",
  };
  document.addEventListener("keydown", (event) => {
    if ((event.metaKey || event.ctrlKey) && event.key === "k" && window.htmx) {
      event.preventDefault();
      palette();
      return;
    }
    if (event.key === "Escape") closeMenus(null);
    // In the search dialog, Enter opens the first hit, and the arrow keys move between hits.
    if (event.target.closest("#palette") && ["Enter", "ArrowDown", "ArrowUp"].includes(event.key)) {
      const stops = all("#palette input, #hits a");
      if (event.key === "Enter") {
        if (event.target.matches("input") && stops[1]) { event.preventDefault(); stops[1].click(); }
        return;
      }
      event.preventDefault();
      const next = stops.indexOf(document.activeElement) + (event.key === "ArrowDown" ? 1 : -1);
      stops[Math.max(0, Math.min(stops.length - 1, next))].focus();
      return;
    }
    if (event.target.matches("input:not([type=checkbox]),textarea,select")) {
      if (event.key === "Escape") event.target.blur();
      return;
    }
    if (event.ctrlKey || event.altKey || event.metaKey) return;
    if (Date.now() - goPressedAt < 900 && destinations[event.key]) {
      location.href = destinations[event.key];
      return;
    }
    if (event.key === "?") open(one("#keys"));
    if (event.key === "g") goPressedAt = Date.now();
    if (event.key === "n") one("[data-new]")?.click();
    if (event.key === "/") {
      const filter = one("[data-search]");
      if (filter) { event.preventDefault(); filter.focus(); filter.select(); }
    }
    if (event.key === "j" || event.key === "k") {
      const rows = all("[data-row] a.main");
      const next = rows.indexOf(document.activeElement) + (event.key === "j" ? 1 : -1);
      rows[Math.max(0, Math.min(rows.length - 1, next))]?.focus();
    }
  });

  const formatRelative = (seconds) => {
    const size = Math.abs(seconds);
    const text = size < 90 ? `${Math.round(size)} s` : size < 5400 ? `${Math.round(size / 60)} min`
      : size < 172800 ? `${Math.round(size / 3600)} h` : `${Math.round(size / 86400)} d`;
    return seconds >= 0 ? `in ${text}` : `${text} ago`;
  };
  const tick = () => all("time[data-rel]").forEach((time) => {
    time.textContent = formatRelative((new Date(time.dateTime) - Date.now()) / 1000);
  });
  setInterval(tick, 1000);
  tick();
  document.addEventListener("htmx:after:swap", tick);

  // Repeat the input event of a filter that the user edited before htmx was ready.
  window.addEventListener("load", () => setTimeout(() => all("form.filters [data-search]").forEach((filter) => {
    if (filter.value !== filter.defaultValue) filter.dispatchEvent(new Event("input", { bubbles: true }));
  }), 300));

  // Show in the header whether the data is current, and its time while the connection is lost.
  let updatedAt = new Date();
  const showLive = (isLost) => {
    const badge = one("[data-live]");
    if (!badge) return;
    const time = updatedAt.toLocaleTimeString([], { timeZoneName: "short" });
    badge.hidden = false;
    badge.className = `live st ${isLost ? "retry" : "ok"}`;
    badge.lastElementChild.textContent = isLost ? `Reconnecting, data from ${time}` : "Live";
    const headline = one("#headline");
    if (isLost && headline) {
      headline.textContent = `No connection to the server: figures are from ${time}`;
      headline.closest(".headline").className = "headline retry";
    }
  };
  document.addEventListener("htmx:sse:after:connection", () => { updatedAt = new Date(); showLive(false); });
  document.addEventListener("htmx:sse:after:message", () => { updatedAt = new Date(); showLive(false); });
  document.addEventListener("htmx:sse:error", () => showLive(true));
  document.addEventListener("htmx:sse:close", () => showLive(true));
  // A page that polls is live too. When the server does not respond, the displayed data stays.
  const onResponse = (status) => {
    if (status >= 500 || status === 429) {
      showLive(true);
      return;
    }
    updatedAt = new Date();
    if (one("[hx-trigger^='every']")) showLive(false);
    else if (!one("[hx-sse\\:connect]")) one("[data-live]")?.toggleAttribute("hidden", true);
  };
  document.addEventListener("htmx:after:request", (event) => onResponse(event.detail.ctx?.response?.status ?? 200));
  document.addEventListener("htmx:error", (event) => { if (event.detail.ctx?.request) showLive(true); });
})();
