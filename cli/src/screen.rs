//! Output of a live table, which is redrawn in place on a terminal. Without a terminal, nothing is drawn.

use std::io::{self, IsTerminal as _, Write as _};

use terminal_size::{Height, Width, terminal_size_of};

pub(crate) enum Screen {
    Terminal {
        /// The number of lines that were drawn last.
        n_drawn_lines: usize,
    },
    NoTerminal,
}

impl Screen {
    pub(crate) fn new() -> Self {
        match io::stdout().is_terminal() {
            true => Self::Terminal { n_drawn_lines: 0 },
            false => Self::NoTerminal,
        }
    }

    pub(crate) fn is_terminal(&self) -> bool {
        matches!(self, Self::Terminal { .. })
    }

    /// The width of the terminal in characters.
    pub(crate) fn width() -> usize {
        terminal_size_of(io::stdout()).map_or(DEFAULT_WIDTH, |(Width(width), _)| width.into())
    }

    /// Replaces the previous drawing.
    pub(crate) fn draw(&mut self, text: &str) {
        let Self::Terminal { n_drawn_lines } = self else { return };
        let height = terminal_size_of(io::stdout()).map_or(usize::MAX, |(_, Height(height))| height.into());
        let lines = truncate_to_terminal(text, Self::width(), height);
        let up = match *n_drawn_lines {
            0 => String::new(),
            n => format!("\x1b[{n}F"),
        };
        *n_drawn_lines = lines.len();
        let mut out = io::stdout().lock();
        // Each line is cleared to its end, then everything below. If the whole screen were cleared first, it would flicker.
        let body: String = lines.iter().map(|line| format!("{line}\x1b[K\n")).collect();
        let _ = write!(out, "{up}{body}\x1b[J").and_then(|()| out.flush());
    }
}

/// Truncates a text to the size of the terminal, which would wrap long lines. Lines that have scrolled off the screen cannot be
/// redrawn.
fn truncate_to_terminal(text: &str, width: usize, height: usize) -> Vec<String> {
    let lines = text.lines().take(height.saturating_sub(1));
    lines.map(|line| line.chars().take(width).collect()).collect()
}

/// Width in characters if the output is not a terminal. It is enough for the whole table; files and pipes do not wrap lines.
const DEFAULT_WIDTH: usize = 250;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_lines_and_lines_below_the_screen_are_left_out() {
        assert_eq!(truncate_to_terminal("añb\nc\n\nd\n", 2, 4), ["añ", "c", ""]);
        assert_eq!(truncate_to_terminal("a\nb\n", 2, 0), [""; 0]);
    }
}
