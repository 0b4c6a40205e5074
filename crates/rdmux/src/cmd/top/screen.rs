//! The screen of `rdmux top`: what it shows, and what keys do. It reads no keys and no node itself.

use std::cmp::Ordering;
use std::collections::{HashMap, VecDeque};

use ratatui::Frame as Surface;
use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};
use ratatui::layout::{Alignment, Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::{Line, Span};
use ratatui::widgets::{Block, Cell, Clear, Paragraph, Row as TableRow, Sparkline, Table, TableState};

use super::frame::{Frame, Key, Row, rate};

/// Rates that are kept of the whole, and of each row.
const HISTORY: usize = 240;
const ROW_HISTORY: usize = 10;

/// Bars of a row's history, lowest first.
const BARS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];

/// Titles and widths of the columns. That of the names takes what is left.
const COLUMNS: [(&str, u16); 12] = [
    ("WHO", 16),
    ("PEER", 15),
    ("ROUTE", 9),
    ("CL", 2),
    ("RATE", 9),
    ("SHARE", 6),
    ("REQ/S", 6),
    ("P50", 7),
    ("P99", 7),
    ("DEPTH", 6),
    ("ERR", 5),
    ("LATELY", 10),
];
/// Columns that a narrow terminal does without, from the first.
const SPARED: [usize; 10] = [11, 1, 3, 2, 7, 10, 6, 5, 9, 8];

const HELP: &str = "\
 up, down, PgUp, PgDn, Home, End   move
 F5 t      tree, or tenants, applications or connections alone
 F6 > <    sort by the next column, or the one before
 F7 I      the other way round
 F4 /      show only rows that have a word; Esc shows all
 space     hold the screen, and go on
 F1 h ?    this help
 F10 q     quit

 RATE   bytes of requests a second: WRITEs, SENDs and READs
 SHARE  part of the bytes of all tenants' requests
 P50    half of the requests take no longer, from the node's taking
        of them to their completion; P99: 99 of 100
 DEPTH  requests that are not complete
 ROUTE  own: a queue pair of its own; shared N: queue pair N of the
        node, on which several connections go

 In the heading, the node waits by sleep (blocked), by polling for
 a moment and then sleep (interrupted), or by polling (running)";

/// Rows that are shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Rows {
    Tree,
    /// Those of a level alone.
    Level(u8),
}

/// Column by which rows are sorted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Sort {
    Name,
    Rate,
    Requests,
    P50,
    P99,
    Depth,
    Errors,
}

impl Sort {
    const ALL: [Sort; 7] = [
        Sort::Name,
        Sort::Rate,
        Sort::Requests,
        Sort::P50,
        Sort::P99,
        Sort::Depth,
        Sort::Errors,
    ];

    fn title(self) -> &'static str {
        match self {
            Sort::Name => "WHO",
            Sort::Rate => "RATE",
            Sort::Requests => "REQ/S",
            Sort::P50 => "P50",
            Sort::P99 => "P99",
            Sort::Depth => "DEPTH",
            Sort::Errors => "ERR",
        }
    }

    fn step(self, by: usize) -> Sort {
        let at = Sort::ALL.iter().position(|one| *one == self).unwrap_or(0);
        Sort::ALL[(at + by) % Sort::ALL.len()]
    }

    /// Compares rows: the largest first, names from A.
    fn compare(self, a: &Row, b: &Row) -> Ordering {
        let (x, y) = (&a.rates, &b.rates);
        match self {
            Sort::Name => a.name.cmp(&b.name),
            Sort::Rate => y.bytes_per_s.total_cmp(&x.bytes_per_s),
            Sort::Requests => y.requests_per_s.total_cmp(&x.requests_per_s),
            Sort::P50 => y.p50_ns.cmp(&x.p50_ns),
            Sort::P99 => y.p99_ns.cmp(&x.p99_ns),
            Sort::Depth => y.waiting_requests.cmp(&x.waiting_requests),
            Sort::Errors => y.errors.cmp(&x.errors),
        }
    }
}

/// The effect of a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Then {
    Stay,
    Quit,
}

/// The screen.
#[derive(Debug)]
pub(super) struct Screen {
    frame: Option<Frame>,
    total: VecDeque<u64>,
    histories: HashMap<Key, VecDeque<u64>>,
    rows: Rows,
    sort: Sort,
    is_reversed: bool,
    filter: String,
    /// Set while keys go into the filter.
    types: bool,
    is_held: bool,
    helps: bool,
    table: TableState,
    /// Height of the table when it was drawn, for pages.
    height: u16,
}

impl Screen {
    pub(super) fn new() -> Screen {
        Screen {
            frame: None,
            total: VecDeque::new(),
            histories: HashMap::new(),
            rows: Rows::Tree,
            sort: Sort::Rate,
            is_reversed: false,
            filter: String::new(),
            types: false,
            is_held: false,
            helps: false,
            table: TableState::new().with_selected(Some(0)),
            height: 0,
        }
    }

    /// Takes what a node has done.
    pub(super) fn take(&mut self, frame: Frame) {
        if self.is_held {
            return;
        }
        push(&mut self.total, HISTORY, frame.bytes_per_s() as u64);
        let mut before = std::mem::take(&mut self.histories);
        for row in frame.tree() {
            let mut history = before.remove(&row.key).unwrap_or_default();
            push(&mut history, ROW_HISTORY, row.rates.bytes_per_s as u64);
            self.histories.insert(row.key, history);
        }
        self.frame = Some(frame);
    }

    /// Does what a key means.
    pub(super) fn press(&mut self, key: KeyEvent) -> Then {
        if key.modifiers.contains(KeyModifiers::CONTROL) {
            return match key.code {
                KeyCode::Char('c') => Then::Quit,
                _ => Then::Stay,
            };
        }
        if self.types {
            match key.code {
                KeyCode::Char(c) => self.filter.push(c),
                KeyCode::Backspace => drop(self.filter.pop()),
                KeyCode::Enter => self.types = false,
                KeyCode::Esc => (self.types, self.filter) = (false, String::new()),
                KeyCode::F(10) => return Then::Quit,
                _ => {}
            }
            return Then::Stay;
        }
        let page = self.height.max(1);
        match key.code {
            KeyCode::Char('q') | KeyCode::F(10) => return Then::Quit,
            _ if std::mem::take(&mut self.helps) => {}
            KeyCode::Char('h' | '?') | KeyCode::F(1) => self.helps = true,
            KeyCode::Char('/') | KeyCode::F(4) => self.types = true,
            KeyCode::Char('t') | KeyCode::F(5) => {
                self.rows = match self.rows {
                    Rows::Tree => Rows::Level(0),
                    Rows::Level(level @ 0..2) => Rows::Level(level + 1),
                    Rows::Level(_) => Rows::Tree,
                }
            }
            KeyCode::Char('>' | '.') | KeyCode::F(6) => self.sort = self.sort.step(1),
            KeyCode::Char('<' | ',') => self.sort = self.sort.step(Sort::ALL.len() - 1),
            KeyCode::Char('I') | KeyCode::F(7) => self.is_reversed = !self.is_reversed,
            KeyCode::Char(' ') => self.is_held = !self.is_held,
            KeyCode::Esc => self.filter.clear(),
            KeyCode::Up | KeyCode::Char('k') => self.table.scroll_up_by(1),
            KeyCode::Down | KeyCode::Char('j') => self.table.scroll_down_by(1),
            KeyCode::PageUp => self.table.scroll_up_by(page),
            KeyCode::PageDown => self.table.scroll_down_by(page),
            KeyCode::Home => self.table.select(Some(0)),
            KeyCode::End => self.table.select(Some(self.shown().len().saturating_sub(1))),
            _ => {}
        }
        Then::Stay
    }

    /// Returns the rows to show, in their order.
    fn shown(&self) -> Vec<Row> {
        let Some(frame) = &self.frame else {
            return Vec::new();
        };
        let word = self.filter.to_lowercase();
        let compare = |a: &Row, b: &Row| match self.is_reversed {
            true => self.sort.compare(b, a),
            false => self.sort.compare(a, b),
        };
        let all = frame.tree();
        match self.rows {
            Rows::Level(level) => {
                let mut rows: Vec<Row> = all
                    .into_iter()
                    .filter(|row| row.level == level && row.has(&word))
                    .collect();
                rows.sort_by(compare);
                rows
            }
            Rows::Tree => {
                let mut rows = Vec::new();
                sorted(&all, 0, &compare, &mut |row| rows.push(row.clone()));
                // Those above a row that has the word stay, and so does all below it.
                let mut kept = vec![false; rows.len()];
                let mut above = [None; 3];
                let mut matched = None;
                for (at, row) in rows.iter().enumerate() {
                    above[usize::from(row.level)] = Some(at);
                    matched = matched.filter(|level| row.level > *level);
                    if row.has(&word) {
                        matched = matched.or(Some(row.level));
                        let parents = &above[..usize::from(row.level)];
                        parents.iter().flatten().for_each(|at| kept[*at] = true);
                    }
                    kept[at] |= matched.is_some();
                }
                let mut kept = kept.into_iter();
                rows.retain(|_| kept.next() == Some(true));
                rows
            }
        }
    }

    /// Draws it.
    pub(super) fn draw(&mut self, surface: &mut Surface<'_>) {
        let [title, history, table, keys] = Layout::vertical([
            Constraint::Length(1),
            Constraint::Length(3),
            Constraint::Min(1),
            Constraint::Length(1),
        ])
        .areas(surface.area());
        let bold = Style::new().add_modifier(Modifier::BOLD);
        let text = match &self.frame {
            Some(frame) => frame.title(),
            None => "waiting for the node".into(),
        };
        surface.render_widget(Line::styled(text, bold), title);
        self.draw_history(surface, history);
        self.draw_table(surface, table);
        surface.render_widget(self.keys(), keys);
        if self.helps {
            draw_help(surface);
        }
    }

    fn draw_history(&self, surface: &mut Surface<'_>, area: Rect) {
        let most = self.total.iter().copied().max().unwrap_or(0);
        let width = usize::from(area.width);
        let skipped = self.total.len().saturating_sub(width);
        let data: Vec<u64> = self.total.iter().skip(skipped).copied().collect();
        let line = Sparkline::default()
            .data(data)
            .max(most.max(1))
            .style(Style::new().fg(Color::Green));
        surface.render_widget(line, area);
        let label = format!("max {}", rate(most as f64));
        let label = Paragraph::new(label).alignment(Alignment::Right);
        surface.render_widget(label, Rect { height: 1, ..area });
    }

    fn draw_table(&mut self, surface: &mut Surface<'_>, area: Rect) {
        let rows = self.shown();
        self.height = area.height.saturating_sub(1);
        if let Some(selected) = self.table.selected() {
            self.table
                .select(Some(selected.min(rows.len().saturating_sub(1))));
        }
        let columns = columns(area.width);
        let right = |at: usize, text: String| match at {
            3..=10 => Line::from(text).alignment(Alignment::Right),
            _ => Line::from(text),
        };
        let arrow = if self.is_reversed { "△" } else { "▽" };
        let header = columns.iter().map(|at| {
            let (at, title) = (*at, COLUMNS[*at].0);
            let is_sorted = self.sort.title() == title;
            let text = match is_sorted {
                true => format!("{title}{arrow}"),
                false => title.to_owned(),
            };
            let style = match is_sorted {
                true => Style::new().fg(Color::Black).bg(Color::Cyan),
                false => Style::new().fg(Color::Black).bg(Color::Green),
            };
            Cell::new(right(at, text)).style(style)
        });
        let header = TableRow::new(header).style(Style::new().bg(Color::Green));
        let is_tree = self.rows == Rows::Tree;
        let lines = rows.iter().map(|row| {
            let indent = if is_tree { usize::from(row.level) * 2 } else { 0 };
            let mut cells = vec![format!("{}{}", " ".repeat(indent), row.name)];
            cells.extend(row.cells());
            cells.push(bars(self.histories.get(&row.key)));
            let cells = columns.iter().map(|at| (*at, std::mem::take(&mut cells[*at])));
            let style = match (row.rates.errors, row.level) {
                (1.., _) => Style::new().fg(Color::Red),
                (0, 0) => Style::new().add_modifier(Modifier::BOLD),
                (0, _) => Style::new(),
            };
            TableRow::new(cells.map(|(at, text)| Cell::new(right(at, text)))).style(style)
        });
        let lines: Vec<_> = lines.collect();
        let widths = columns.iter().map(|at| match *at {
            0 => Constraint::Fill(1),
            at => Constraint::Length(COLUMNS[at].1),
        });
        let table = Table::new(lines, widths)
            .header(header)
            .row_highlight_style(Style::new().add_modifier(Modifier::REVERSED));
        surface.render_stateful_widget(table, area, &mut self.table);
    }

    /// Returns the last line: the filter while it is typed, else the keys.
    fn keys(&self) -> Line<'static> {
        if self.types {
            return Line::from(format!("/{}_", self.filter));
        }
        let view = match self.rows {
            Rows::Tree => "Tree",
            Rows::Level(0) => "Tenants",
            Rows::Level(1) => "Applications",
            Rows::Level(_) => "Connections",
        };
        let filter = match self.filter.as_str() {
            "" => "Filter".to_owned(),
            filter => format!("Filter: {filter}"),
        };
        let held = if self.is_held { "Held" } else { "Hold" };
        let pairs = [
            ("F1", "Help".to_owned()),
            ("F4", filter),
            ("F5", view.to_owned()),
            ("F6", format!("Sort: {}", self.sort.title())),
            ("F7", "Turn".to_owned()),
            ("Space", held.to_owned()),
            ("F10", "Quit".to_owned()),
        ];
        let label = Style::new().fg(Color::Black).bg(Color::Cyan);
        let spans = pairs
            .into_iter()
            .flat_map(|(key, text)| [Span::raw(key), Span::styled(text, label), Span::raw(" ")]);
        Line::from(spans.collect::<Vec<_>>())
    }
}

/// Returns the columns for which there is room.
fn columns(width: u16) -> Vec<usize> {
    let mut columns: Vec<usize> = (0..COLUMNS.len()).collect();
    for spared in SPARED {
        let needed: u16 = columns.iter().map(|at| COLUMNS[*at].1 + 1).sum();
        if needed <= width + 1 {
            break;
        }
        columns.retain(|at| *at != spared);
    }
    columns
}

fn draw_help(surface: &mut Surface<'_>) {
    let all = surface.area();
    let lines = HELP.lines().count() as u16;
    let (width, height) = (70.min(all.width), (lines + 2).min(all.height));
    let area = Rect {
        x: (all.width - width) / 2,
        y: (all.height - height) / 2,
        width,
        height,
    };
    surface.render_widget(Clear, area);
    let block = Block::bordered().title("rdmux top");
    surface.render_widget(Paragraph::new(HELP).block(block), area);
}

/// Visits the rows of a tree, each level sorted below its parent.
fn sorted(rows: &[Row], level: u8, compare: &impl Fn(&Row, &Row) -> Ordering, visit: &mut impl FnMut(&Row)) {
    let mut parts: Vec<&[Row]> = Vec::new();
    let mut rest = rows;
    while let Some((_, behind)) = rest.split_first() {
        let below = behind.iter().take_while(|row| row.level > level).count();
        let (part, others) = rest.split_at(1 + below);
        parts.push(part);
        rest = others;
    }
    parts.sort_by(|a, b| compare(&a[0], &b[0]));
    for part in parts {
        visit(&part[0]);
        if part.len() > 1 {
            sorted(&part[1..], level + 1, compare, visit);
        }
    }
}

fn push(history: &mut VecDeque<u64>, most: usize, value: u64) {
    if history.len() == most {
        history.pop_front();
    }
    history.push_back(value);
}

fn bars(history: Option<&VecDeque<u64>>) -> String {
    let history = history.into_iter().flatten().copied();
    let most = history.clone().max().unwrap_or(0).max(1) as f64;
    let last = (BARS.len() - 1) as f64;
    let bar = |value: u64| match value {
        0 => ' ',
        value => BARS[(value as f64 / most * last).round() as usize],
    };
    history.map(bar).collect()
}
