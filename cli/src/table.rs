//! Tables of text: columns as wide as their widest cell.

use std::fmt::Write as _;

/// A line of titles and one for each row.
pub(crate) fn text<const N: usize>(titles: &[&str; N], rows: impl IntoIterator<Item = [String; N]>) -> String {
    let rows: Vec<_> = std::iter::once(titles.map(str::to_owned)).chain(rows).collect();
    let mut text = String::new();
    for row in &rows {
        let mut line = String::new();
        for (column, cell) in row.iter().enumerate() {
            let width = rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
            let _ = write!(line, "{cell:<width$}   ");
        }
        text.push_str(line.trim_end());
        text.push('\n');
    }
    text
}
