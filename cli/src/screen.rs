//! Where the live table goes: redrawn in place on a terminal, a line now and then elsewhere.

use std::io::{self, IsTerminal as _, Write as _};

use terminal_size::{Height, Width, terminal_size_of};

pub(crate) enum Screen {
    /// How many lines the last drawing has.
    Terminal {
        drawn: usize,
    },
    Lines,
}

impl Screen {
    pub(crate) fn new() -> Self {
        match io::stdout().is_terminal() {
            true => Self::Terminal { drawn: 0 },
            false => Self::Lines,
        }
    }

    pub(crate) fn is_terminal(&self) -> bool {
        matches!(self, Self::Terminal { .. })
    }

    /// How many characters fit in a line.
    pub(crate) fn width() -> usize {
        terminal_size_of(io::stdout()).map_or(DEFAULT_WIDTH, |(Width(width), _)| width.into())
    }

    /// Draws over what was drawn before.
    pub(crate) fn draw(&mut self, text: &str) {
        let Self::Terminal { drawn } = self else { return };
        let height = terminal_size_of(io::stdout()).map_or(usize::MAX, |(_, Height(height))| height.into());
        // What has scrolled away cannot be drawn over: the lines that do not fit are left out, at the end.
        let lines: Vec<&str> = text.lines().take(height.saturating_sub(1)).collect();
        let up = match *drawn {
            0 => String::new(),
            n => format!("\x1b[{n}F"),
        };
        *drawn = lines.len();
        let mut out = io::stdout().lock();
        // Each line is cleared to its end, and then all below: clearing first would flicker.
        let body: String = lines.iter().map(|line| format!("{line}\x1b[K\n")).collect();
        let _ = write!(out, "{up}{body}\x1b[J").and_then(|()| out.flush());
    }
}

/// Wide enough for the whole table; files and pipes do not wrap.
const DEFAULT_WIDTH: usize = 250;
