//! Finds the paths of a source file that start at the crate's root.
//!
//! It reads tokens, not syntax: enough for `crate::room`, `crate::{room, ..}` and `super::` up to the root.

use std::iter::Peekable;
use std::str::Chars;

/// A path to a top-level module.
#[derive(Debug, PartialEq)]
pub(crate) struct Import {
    pub(crate) line: usize,
    pub(crate) room: String,
}

/// All paths from the root, in a file whose module lies `depth` below it.
pub(crate) fn from_root(source: &str, depth: usize) -> Vec<Import> {
    let tokens = tokens(source);
    let mut imports = Vec::new();
    // For every open brace, whether an inline module opened it: inside, `super` starts one lower.
    let mut braces = Vec::new();
    let mut at = 0;
    while let Some(token) = tokens.get(at) {
        match token.text.as_str() {
            "{" => braces.push(at >= 2 && tokens[at - 2].text == "mod"),
            "}" => _ = braces.pop(),
            "crate" => imports.extend(rooms(&tokens[at + 1..])),
            "super" => {
                let n_supers = 1 + tokens[at + 1..].chunks(2).take_while(|pair| is_super(pair)).count();
                at += 2 * (n_supers - 1);
                if n_supers == depth + braces.iter().filter(|is_module| **is_module).count() {
                    imports.extend(rooms(&tokens[at + 1..]));
                }
            }
            _ => {}
        }
        at += 1;
    }
    imports
}

fn is_super(pair: &[Token]) -> bool {
    matches!(pair, [colons, next] if colons.text == "::" && next.text == "super")
}

/// The first names after `crate` or the last `super`.
fn rooms(rest: &[Token]) -> Vec<Import> {
    let import = |token: &Token| Import {
        line: token.line,
        room: token.text.clone(),
    };
    match rest {
        [colons, brace, inside @ ..] if colons.text == "::" && brace.text == "{" => {
            group(inside).into_iter().map(import).collect()
        }
        [colons, name, ..] if colons.text == "::" => vec![import(name)],
        // `pub(crate)`, and the like.
        _ => Vec::new(),
    }
}

/// The first token of each element of a brace group, whose opening brace is already past.
fn group(inside: &[Token]) -> Vec<&Token> {
    let mut depth = 0;
    let mut is_first = true;
    let mut firsts = Vec::new();
    for token in inside {
        match token.text.as_str() {
            "{" => depth += 1,
            "}" if depth == 0 => break,
            "}" => depth -= 1,
            "," if depth == 0 => {
                is_first = true;
                continue;
            }
            "self" => {}
            _ if is_first => firsts.push(token),
            _ => {}
        }
        is_first = false;
    }
    firsts
}

struct Token {
    line: usize,
    text: String,
}

/// Names, `::` and single signs; comments and literals are left out.
fn tokens(source: &str) -> Vec<Token> {
    let mut scanner = Scanner {
        rest: source.chars().peekable(),
        line: 1,
    };
    let mut tokens = Vec::new();
    while let Some(c) = scanner.next() {
        let line = scanner.line;
        let text = match c {
            '/' if scanner.rest.peek() == Some(&'/') => {
                while scanner.rest.peek().is_some_and(|c| *c != '\n') {
                    scanner.next();
                }
                continue;
            }
            '/' if scanner.rest.peek() == Some(&'*') => {
                scanner.skip_block_comment();
                continue;
            }
            '"' => {
                scanner.skip_string();
                continue;
            }
            '\'' => {
                scanner.skip_char_or_lifetime();
                continue;
            }
            ':' if scanner.rest.peek() == Some(&':') => {
                scanner.next();
                "::".to_owned()
            }
            c if c.is_alphanumeric() || c == '_' => {
                let name = scanner.name(c);
                if matches!(name.as_str(), "r" | "br" | "cr") && scanner.skip_raw_string() {
                    continue;
                }
                name
            }
            c if c.is_whitespace() => continue,
            c => c.to_string(),
        };
        tokens.push(Token { line, text });
    }
    tokens
}

struct Scanner<'a> {
    rest: Peekable<Chars<'a>>,
    line: usize,
}

impl Scanner<'_> {
    fn next(&mut self) -> Option<char> {
        let c = self.rest.next();
        self.line += usize::from(c == Some('\n'));
        c
    }

    fn name(&mut self, first: char) -> String {
        let mut name = String::from(first);
        while let Some(c) = self.rest.next_if(|c| c.is_alphanumeric() || *c == '_') {
            name.push(c);
        }
        name
    }

    fn skip_block_comment(&mut self) {
        let mut depth = 0;
        let mut last = '/';
        while let Some(c) = self.next() {
            match (last, c) {
                ('/', '*') => depth += 1,
                ('*', '/') => depth -= 1,
                _ => {
                    last = c;
                    continue;
                }
            }
            if depth == 0 {
                return;
            }
            // The second sign of a pair never starts the next one.
            last = ' ';
        }
    }

    fn skip_string(&mut self) {
        while let Some(c) = self.next() {
            match c {
                '\\' => _ = self.next(),
                '"' => return,
                _ => {}
            }
        }
    }

    /// Skips what follows `r`, if it is a raw string and not a raw name.
    fn skip_raw_string(&mut self) -> bool {
        let mut ahead = self.rest.clone();
        let mut n_hashes = 0;
        while ahead.next_if_eq(&'#').is_some() {
            n_hashes += 1;
        }
        if ahead.next() != Some('"') {
            return false;
        }
        let end = format!("\"{}", "#".repeat(n_hashes));
        let body: String = ahead.collect();
        let length = body.find(&end).map_or(body.len(), |start| start + end.len());
        let n_chars = n_hashes + 1 + body[..length].chars().count();
        for _ in 0..n_chars {
            self.next();
        }
        true
    }

    /// A quote starts a character if another one closes it, and a lifetime otherwise.
    fn skip_char_or_lifetime(&mut self) {
        let mut ahead = self.rest.clone();
        match (ahead.next(), ahead.next()) {
            (Some('\\'), _) => {
                self.next();
                self.next();
                while self.next().is_some_and(|c| c != '\'') {}
            }
            (_, Some('\'')) => {
                self.next();
                self.next();
            }
            _ => {}
        }
    }
}

#[test]
fn paths_are_found_wherever_they_stand() {
    let check = |source: &str, depth: usize, expected: &[(usize, &str)]| {
        let expected: Vec<_> = expected
            .iter()
            .map(|(line, room)| Import {
                line: *line,
                room: (*room).into(),
            })
            .collect();
        assert_eq!(from_root(source, depth), expected, "{source}");
    };
    check("use crate::a::b;\nuse crate::c;", 1, &[(1, "a"), (2, "c")]);
    check("use crate::{a::{self, b}, self,\n c as d};", 1, &[(1, "a"), (2, "c")]);
    check("fn f() -> crate::a::B { $crate::b!() }", 1, &[(1, "a"), (1, "b")]);
    check("pub(crate) fn f() {}", 1, &[]);
    check("pub(in crate::a) fn f() {}", 1, &[(1, "a")]);
    check("// crate::a\n/* crate::b /* nested */ crate::c */ /// crate::d", 1, &[]);
    check(
        r##"let s = ("crate::a \" crate::b", r#"crate::" c"#, b'"', '\'', 'x'); crate::d"##,
        1,
        &[(1, "d")],
    );
    check("fn f<'a>(x: &'a str) { crate::b }", 1, &[(1, "b")]);
    check("use super::a;", 2, &[]);
    check("use super::super::a;", 2, &[(1, "a")]);
    check("use super::{a, b::c};", 1, &[(1, "a"), (1, "b")]);
    check(
        "fn f() {} mod tests { use super::a; fn g() { super::super::b } }",
        1,
        &[(1, "b")],
    );
    check("mod tests { use super::a; } use super::c;", 1, &[(1, "c")]);
}
