//! Finds all imports of a source file from its own crate, including paths inside expressions.
//!
//! The parser reads tokens, not syntax: a path counts if it begins with `crate`, `self`, `super` or a child module.

use std::collections::BTreeSet;
use std::slice::Iter;

use proc_macro2::{Delimiter, TokenStream, TokenTree};

/// A path to an item of the same crate.
#[derive(Debug, Eq, Ord, PartialEq, PartialOrd)]
pub(crate) struct Import {
    pub(crate) line: usize,
    /// From the root of the crate: `crate::net::Io` is `[net, Io]`.
    pub(crate) path: Vec<String>,
    /// Whether the import is in test code.
    pub(crate) is_test: bool,
}

/// All imports of the file of a module.
///
/// # Panics
/// Panics if the source is not valid Rust.
pub(crate) fn imports(source: &str, module: &[String]) -> Vec<Import> {
    let tokens: TokenStream = source.parse().expect("the compiler reads it too");
    let mut found = Vec::new();
    let scope = Scope {
        module: module.to_vec(),
        is_test: false,
    };
    scope.read(&tokens.into_iter().collect::<Vec<_>>(), &BTreeSet::new(), &mut found);
    found
}

/// The context of some tokens.
#[derive(Clone)]
struct Scope {
    module: Vec<String>,
    is_test: bool,
}

impl Scope {
    /// Reads the tokens of a module or of a part of it; `children` are the modules declared around them.
    fn read(&self, tokens: &[TokenTree], children: &BTreeSet<String>, found: &mut Vec<Import>) {
        let mut children = children.clone();
        children.extend(
            tokens
                .windows(2)
                .filter(|pair| is_name(&pair[0], "mod"))
                .map(|pair| pair[1].to_string()),
        );
        let mut at = 0;
        while let Some(token) = tokens.get(at) {
            let rest = &tokens[at + 1..];
            at += 1;
            match (token, rest) {
                (TokenTree::Punct(hash), [TokenTree::Group(attribute), after @ ..]) if hash.as_char() == '#' => {
                    at += 1;
                    if is_cfg_test(attribute.stream()) {
                        let length = after.iter().position(ends_item).map_or(after.len(), |end| end + 1);
                        let scope = Self {
                            is_test: true,
                            ..self.clone()
                        };
                        scope.read(&after[..length], &children, found);
                        at += length;
                    } else {
                        self.read(&trees(attribute.stream()), &children, found);
                    }
                }
                (TokenTree::Ident(word), [name, TokenTree::Group(body), ..]) if word == "mod" => {
                    let mut scope = self.clone();
                    scope.module.push(name.to_string());
                    scope.read(&trees(body.stream()), &BTreeSet::new(), found);
                    at += 2;
                }
                (TokenTree::Ident(word), _) if word == "use" => {
                    let length = rest.iter().position(|token| is_sign(token, ';')).unwrap_or(rest.len());
                    for path in use_tree(&rest[..length]) {
                        found.extend(self.import(token.span().start().line, path, &children));
                    }
                    at += length;
                }
                (TokenTree::Ident(_), [colon, ..]) if is_sign(colon, ':') => {
                    let path = path(&mut tokens[at - 1..].iter());
                    at += (path.len() - 1) * 3; // each further name follows two tokens `:`
                    if path.len() > 1 {
                        found.extend(self.import(token.span().start().line, path, &children));
                    }
                }
                // `pub(in crate::a)` is a visibility, not an import.
                (TokenTree::Group(group), _) if !is_visibility(group) => {
                    self.read(&trees(group.stream()), &children, found);
                }
                _ => {}
            }
        }
    }

    /// An import, unless the path leads out of the crate or starts at an imported name.
    fn import(&self, line: usize, path: Vec<String>, children: &BTreeSet<String>) -> Option<Import> {
        let n_supers = path.iter().take_while(|name| *name == "super").count();
        let (base, rest) = match path.first().map(String::as_str) {
            Some("crate") => (&[][..], &path[1..]),
            Some("self") => (&self.module[..], &path[1..]),
            Some("super") => (
                &self.module[..self.module.len().checked_sub(n_supers)?],
                &path[n_supers..],
            ),
            Some(child) if children.contains(child) => (&self.module[..], &path[..]),
            _ => return None,
        };
        Some(Import {
            line,
            path: base.iter().chain(rest).cloned().collect(),
            is_test: self.is_test,
        })
    }
}

/// The paths of a `use`: `a::{self, b as c}` has `a` and `a::b`. A final `self` or `*` stands for the module itself.
fn use_tree(tokens: &[TokenTree]) -> Vec<Vec<String>> {
    let mut rest = tokens.iter();
    let prefix = path(&mut rest);
    let mut paths: Vec<Vec<String>> = match rest.as_slice() {
        [TokenTree::Group(group), ..] => trees(group.stream())
            .split(|token| is_sign(token, ','))
            .filter(|element| !element.is_empty())
            .flat_map(use_tree)
            .map(|path| prefix.iter().cloned().chain(path).collect())
            .collect(),
        _ => vec![prefix],
    };
    for path in &mut paths {
        if path.len() > 1 && path.last().is_some_and(|name| name == "self") {
            path.pop();
        }
    }
    paths
}

/// Reads a path at the start of some tokens, and consumes it with its `::`.
fn path(tokens: &mut Iter<'_, TokenTree>) -> Vec<String> {
    let mut names = Vec::new();
    while let Some((TokenTree::Ident(name), rest)) = tokens.as_slice().split_first() {
        names.push(name.to_string());
        *tokens = rest.iter();
        match rest {
            [a, b, ..] if is_sign(a, ':') && is_sign(b, ':') => *tokens = rest[2..].iter(),
            _ => break,
        }
    }
    names
}

fn trees(stream: TokenStream) -> Vec<TokenTree> {
    stream.into_iter().collect()
}

fn is_name(token: &TokenTree, name: &str) -> bool {
    matches!(token, TokenTree::Ident(ident) if ident == name)
}

fn is_sign(token: &TokenTree, sign: char) -> bool {
    matches!(token, TokenTree::Punct(punct) if punct.as_char() == sign)
}

fn is_cfg_test(attribute: TokenStream) -> bool {
    let text = attribute.to_string();
    text.starts_with("cfg") && text.contains("test")
}

fn is_visibility(group: &proc_macro2::Group) -> bool {
    let first = group.stream().into_iter().next();
    group.delimiter() == Delimiter::Parenthesis && first.is_some_and(|first| is_name(&first, "in"))
}

/// Whether a token ends an item.
fn ends_item(token: &TokenTree) -> bool {
    is_sign(token, ';') || matches!(token, TokenTree::Group(group) if group.delimiter() == Delimiter::Brace)
}

#[test]
fn paths_are_found_at_every_position() {
    let check = |source: &str, module: &str, expected: &[(usize, &str)]| {
        let module: Vec<String> = module.split("::").map(str::to_owned).collect();
        let found = imports(source, &module);
        let found: Vec<_> = found
            .iter()
            .map(|import| (import.line, import.path.join("::")))
            .collect();
        let expected: Vec<_> = expected
            .iter()
            .map(|(line, path)| (*line, (*path).to_owned()))
            .collect();
        assert_eq!(found, expected, "{source}");
    };
    check("use crate::a::b;\nuse crate::c;", "m", &[(1, "a::b"), (2, "c")]);
    check(
        "use crate::{a::{self, b}, self as s,\n c as d};",
        "m",
        &[(1, "a"), (1, "a::b"), (1, ""), (1, "c")],
    );
    check("fn f() -> crate::a::B { $crate::b!() }", "m", &[(1, "a::B"), (1, "b")]);
    check("pub(crate) fn f() {}", "m", &[]);
    check("pub(in crate::a) fn f() {}", "m", &[]);
    check(
        "// crate::a\n/* crate::b /* nested */ crate::c */\n/// crate::d\nfn f() {}",
        "m",
        &[],
    );
    check(
        r##"fn f() { ("crate::a \" crate::b", r#"crate::" c"#, b'"', '\'', 'x'); crate::d }"##,
        "m",
        &[(1, "d")],
    );
    check("fn f<'a>(x: &'a str) { crate::b }", "m", &[(1, "b")]);
    check("use super::a;", "m::n", &[(1, "m::a")]);
    check("use super::super::a;", "m::n", &[(1, "a")]);
    check(
        "use super::{a, b::c}; use super::*;",
        "m::n",
        &[(1, "m::a"), (1, "m::b::c"), (1, "m")],
    );
    check("use self::a::B; fn f() { self.g() }", "m", &[(1, "m::a::B")]);
    check(
        "mod a; use a::B; fn f() { a::g(); h::i() }",
        "m",
        &[(1, "m::a::B"), (1, "m::a::g")],
    );
    check(
        "fn f() {} mod o { use super::a; fn g() { super::super::b } }",
        "m",
        &[(1, "m::a"), (1, "b")],
    );
    check(
        "macro!(x = crate::a::b()); use std::fmt; fn f() { u8::from(1) }",
        "m",
        &[(1, "a::b")],
    );
}

#[test]
fn test_imports_are_distinguished() {
    let source = "use crate::a;\n#[cfg(test)]\nuse crate::b;\n#[cfg(test)]\n#[path = \"x.rs\"]\nmod tests { use crate::c; }\nuse crate::d;";
    let is_test: Vec<_> = imports(source, &[])
        .into_iter()
        .map(|import| (import.path.concat(), import.is_test))
        .collect();
    let expected = [("a", false), ("b", true), ("c", true), ("d", false)];
    assert_eq!(is_test, expected.map(|(path, is_test)| (path.to_owned(), is_test)));
}
