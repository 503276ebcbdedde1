//! Tables of text: columns as wide as their widest cell.

use std::fmt::Write as _;

/// Formats a line of titles and one line per row.
pub(crate) fn render<const N: usize>(titles: &[&str; N], rows: impl IntoIterator<Item = [String; N]>) -> String {
    render_rows(titles, rows.into_iter().map(Vec::from))
}

/// Like [`render`], for rows whose number of cells is known only at run time.
pub(crate) fn render_rows(titles: &[&str], rows: impl IntoIterator<Item = Vec<String>>) -> String {
    let titles = titles.iter().map(|title| (*title).to_owned()).collect();
    // Replaces control characters, because a name in the table must not control the terminal.
    let plain = |cell: String| cell.replace(char::is_control, "\u{fffd}");
    let rows = rows.into_iter().map(|row| row.into_iter().map(plain).collect());
    let rows: Vec<Vec<String>> = std::iter::once(titles).chain(rows).collect();
    let mut widths = Vec::new();
    for row in &rows {
        widths.resize(row.len().max(widths.len()), 0);
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = cell.chars().count().max(*width);
        }
    }
    let mut text = String::new();
    for row in &rows {
        let mut line = String::new();
        for (cell, width) in row.iter().zip(&widths) {
            let _ = write!(line, "{cell:<width$}   ");
        }
        text.push_str(line.trim_end());
        text.push('\n');
    }
    text
}
