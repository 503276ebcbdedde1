//! Output of the live table: redrawn in place on a terminal. Without a terminal, nothing is drawn.

use std::io::{self, IsTerminal as _, Write as _};

use terminal_size::{Height, Width, terminal_size_of};

pub(crate) enum Screen {
    Terminal {
        /// The number of lines of the last drawing.
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
        let lines = fit(text, Self::width(), height);
        let up = match *n_drawn_lines {
            0 => String::new(),
            n => format!("\x1b[{n}F"),
        };
        *n_drawn_lines = lines.len();
        let mut out = io::stdout().lock();
        // Clears each line to its end, and then everything below. Clearing the screen first would flicker.
        let body: String = lines.iter().map(|line| format!("{line}\x1b[K\n")).collect();
        let _ = write!(out, "{up}{body}\x1b[J").and_then(|()| out.flush());
    }
}

/// Leaves out what does not fit: the terminal would wrap long lines, and lines that have scrolled off the screen cannot be redrawn.
fn fit(text: &str, width: usize, height: usize) -> Vec<String> {
    let lines = text.lines().take(height.saturating_sub(1));
    lines.map(|line| line.chars().take(width).collect()).collect()
}

/// Characters. Wide enough for the whole table; files and pipes do not wrap lines.
const DEFAULT_WIDTH: usize = 250;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_lines_and_lines_below_the_screen_are_left_out() {
        assert_eq!(fit("añb\nc\n\nd\n", 2, 4), ["añ", "c", ""]);
        assert_eq!(fit("a\nb\n", 2, 0), [""; 0]);
    }
}
