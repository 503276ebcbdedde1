//! The documents on compatibility and security name only tests that exist.

use std::fs;

use super::root;

/// Rows of these sections that name a test that does not exist, and rows that make a claim and name no test.
fn wrong_rows(
    page: &str,
    is_section: impl Fn(&str) -> bool,
    source_of: impl Fn(&str) -> Option<String>,
) -> Vec<String> {
    let mut wrong = Vec::new();
    let mut is_checked = false;
    for line in page.lines() {
        if let Some(title) = line.strip_prefix("## ") {
            is_checked = is_section(title);
        }
        let cells: Vec<&str> = line.split(" | ").collect();
        let (true, [row, verdict, tests]) = (is_checked, &cells[..]) else {
            continue;
        };
        let (row, tests) = (row.trim_start_matches("| "), tests.trim_end_matches('|').trim());
        if matches!(tests, "Test" | "") {
            if ["kept", "improved", "holds"]
                .iter()
                .any(|claim| verdict.starts_with(claim))
            {
                wrong.push(format!("{row}: neither a test, nor that there is none"));
            }
            continue;
        }
        let mut source = None;
        for word in tests.split([' ', ',', ';']) {
            if let Some(file) = word.strip_prefix('`').and_then(|word| word.strip_suffix('`')) {
                if file.ends_with(".rs") {
                    source = source_of(file);
                    if source.is_none() {
                        wrong.push(format!("{row}: there is no {file}"));
                    }
                }
                continue;
            }
            let name = word.trim_end_matches('…');
            let is_name = name.contains('_')
                && name
                    .chars()
                    .all(|c| c.is_ascii_lowercase() || "_0123456789".contains(c));
            if !is_name {
                continue;
            }
            let is_whole = !word.ends_with('…');
            let is_there = source.as_ref().is_some_and(|source| {
                source.lines().any(|line| {
                    let rest = line.split_once("fn ").and_then(|(_, rest)| rest.strip_prefix(name));
                    rest.is_some_and(|rest| !is_whole || rest.starts_with('('))
                })
            });
            if !is_there {
                wrong.push(format!("{row}: there is no test {word}"));
            }
        }
    }
    wrong
}

#[test]
fn tests_named_in_compatibility_md_exist() {
    let page = fs::read_to_string(root().join("docs/compatibility.md")).expect("the page is there");
    let wrong = wrong_rows(&page, |title| title.starts_with("Proxy: "), source_of);
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn tests_named_in_security_md_exist() {
    let page = fs::read_to_string(root().join("docs/security.md")).expect("the page is there");
    let wrong = wrong_rows(&page, |title| SECTIONS_WITH_TESTS.contains(&title), source_of);
    assert!(wrong.is_empty(), "{wrong:#?}");
    let rows = |line: &&str| line.contains(" | holds");
    assert!(page.lines().filter(rows).count() > 20);
    for section in SECTIONS_WITH_TESTS {
        assert!(page.contains(&format!("\n## {section}\n")), "{section}");
    }
}

/// The sections whose rows need a test.
const SECTIONS_WITH_TESTS: [&str; 3] = ["Identity and TLS", "Policy", "Control plane"];

/// The text of a file that a document names.
fn source_of(file: &str) -> Option<String> {
    let paths = [root().join("tests/tests").join(file), root().join(file)];
    paths.iter().find_map(|path| fs::read_to_string(path).ok())
}

#[test]
fn a_test_that_does_not_exist_is_found() {
    let source_of = |file: &str| (file == "mesh/a.rs").then(|| "#[test]\nfn one_and_two() {".to_owned());
    let page = "\
## Other
| x | kept | `mesh/b.rs` nothing_here |
## Proxy: a
| Row | | Test |
| x | kept | `mesh/a.rs` one_and…, one_and_two |
| y | kept | `mesh/a.rs` one_and, two_and… |
| z | kept | `mesh/b.rs` one_and_two |
| no | improved: a bit | |
| nor | kept: as it was | |
| said | kept | no test |
| well | not yet | |
| hold | holds | |
";
    assert_eq!(
        wrong_rows(page, |title| title.starts_with("Proxy: "), source_of),
        [
            "y: there is no test one_and",
            "y: there is no test two_and…",
            "z: there is no mesh/b.rs",
            "z: there is no test one_and_two",
            "no: neither a test, nor that there is none",
            "nor: neither a test, nor that there is none",
            "hold: neither a test, nor that there is none",
        ]
    );
}
