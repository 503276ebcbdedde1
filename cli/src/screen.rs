//! Output of the live table: redrawn in place on a terminal. Without a terminal, nothing is drawn.

use std::io::{self, IsTerminal as _, Write as _};

use terminal_size::{Height, Width, terminal_size_of};

pub(crate) enum Screen {
    /// Number of lines of the last drawing.
    Terminal {
        drawn: usize,
    },
    NoTerminal,
}

impl Screen {
    pub(crate) fn new() -> Self {
        match io::stdout().is_terminal() {
            true => Self::Terminal { drawn: 0 },
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
        let Self::Terminal { drawn } = self else { return };
        let height = terminal_size_of(io::stdout()).map_or(usize::MAX, |(_, Height(height))| height.into());
        // Lines that have scrolled off the screen cannot be redrawn, so lines that do not fit are left out.
        let lines: Vec<&str> = text.lines().take(height.saturating_sub(1)).collect();
        let up = match *drawn {
            0 => String::new(),
            n => format!("\x1b[{n}F"),
        };
        *drawn = lines.len();
        let mut out = io::stdout().lock();
        // Clears each line to its end, and then everything below. Clearing the screen first would flicker.
        let body: String = lines.iter().map(|line| format!("{line}\x1b[K\n")).collect();
        let _ = write!(out, "{up}{body}\x1b[J").and_then(|()| out.flush());
    }
}

/// Characters. Wide enough for the whole table; files and pipes do not wrap lines.
const DEFAULT_WIDTH: usize = 250;
