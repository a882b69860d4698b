// Sphinx finds only pages that have every word of a query. This adds sections whose heading or index entry has the words
// in any order, or half of them if no section has all; and pages with some words, if no page has all. Each place is
// shown once, answers before reference entries.
document.addEventListener('DOMContentLoaded', () => {
  if (typeof Search === 'undefined') return;
  const everyWord = Search._performSearch;
  // Words that say little, beside Sphinx's own.
  const fillers = new Set(['can', 'use', 'get', 'much', 'mani', 'need', 'work', 'turn']);

  const sections = (terms) => {                    // with the share of the words that a heading or an entry has
    const { docnames, filenames, titles, alltitles, indexentries } = Search._index;
    const stemmer = new Stemmer();
    const headings = new Map();
    for (const [title, places] of Object.entries(alltitles))
      for (const [file, id] of places)
        headings.set(file + '#' + (id ?? ''), titles[file] === title ? title : `${titles[file]} > ${title}`);
    const found = new Map();                       // by place: the terms that its heading and its entries have
    for (const texts of [alltitles, indexentries])
      for (const [text, places] of Object.entries(texts)) {
        const words = new Set(splitQuery(text.toLowerCase()).map((word) => stemmer.stemWord(word)));
        const hits = [...terms].filter((term) => words.has(term));
        if (!hits.length) continue;
        for (const [file, id] of places) {
          const place = file + '#' + (id ?? '');
          if (!found.has(place)) found.set(place, { file, id, terms: new Set(), best: 0 });
          const entry = found.get(place);
          hits.forEach((term) => entry.terms.add(term));
          entry.best = Math.max(entry.best, hits.length / (1 + words.size));
        }
      }
    return [...found].map(([place, { file, id, terms: has, best }]) => {
      const share = has.size / terms.size;
      return [docnames[file], headings.get(place) ?? titles[file], id ? '#' + id : '', null,
              100 * share + 20 * best - (docnames[file].startsWith('api') ? 5 : 0), filenames[file], SearchResultKind.title, share];
    });
  };

  Search._performSearch = (query, terms, excluded, highlighted, objects) => {
    const telling = new Set([...terms].filter((term) => !fillers.has(term)));
    if (telling.size) terms = telling;
    const hits = everyWord(query, terms, excluded, highlighted, objects);
    const near = sections(terms).filter((hit) => hit[7] >= 0.5);
    const exact = near.filter((hit) => hit[7] === 1);
    const pages = new Map();
    if (!hits.length)                              // no page has every word
      for (const term of terms)
        for (const hit of Search.performTermsSearch(new Set([term]), excluded)) {
          const page = pages.get(hit[0]) ?? hit;
          page[4] += 10;
          pages.set(hit[0], page);
        }
    hits.push(...[...pages.values()].sort((a, b) => b[4] - a[4]).slice(0, 5));
    if (exact.length) hits.push(...exact);
    else if (!hits.some((hit) => hit[2])) hits.push(...near);
    const best = new Map();
    for (const hit of hits.sort((a, b) => b[4] - a[4])) {
      const place = hit[0] + hit[2];
      if (!best.has(place)) best.set(place, hit);
    }
    const named = new Set([...best.values()].filter((hit) => hit[2]).map((hit) => hit[0]));
    return [...best.values()].filter((hit) => hit[2] || !named.has(hit[0])).reverse();
  };
});
