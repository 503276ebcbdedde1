//! The documents on compatibility and security name only tests that exist, and links of all documents are valid.

use std::fs;
use std::path::{Path, PathBuf};

use super::root;

/// The rows of these sections that name a test that does not exist, or that make a claim without naming a test.
fn wrong_rows(
    page: &str,
    is_section: impl Fn(&str) -> bool,
    read_source: impl Fn(&str) -> Option<String>,
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
                wrong.push(format!("{row}: name a test, or write 'no test'"));
            }
            continue;
        }
        let mut source = None;
        for word in tests.split([' ', ',', ';']) {
            if let Some(file) = word.strip_prefix('`').and_then(|word| word.strip_suffix('`')) {
                if file.ends_with(".rs") {
                    source = read_source(file);
                    if source.is_none() {
                        wrong.push(format!("{row}: there is no {file}"));
                    }
                }
                continue;
            }
            let name = word.trim_end_matches('…');
            if !is_test_name(name) {
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
    let page = fs::read_to_string(root().join("docs/reference/compatibility.md")).expect("the page exists");
    let wrong = wrong_rows(&page, |title| title.starts_with("Proxy: "), read_source);
    assert!(wrong.is_empty(), "{wrong:#?}");
    let mut sources = Vec::new();
    find_files(&root(), "rs", &mut sources);
    let sources = sources
        .iter()
        .map(|path| fs::read_to_string(path).expect("the source is UTF-8"));
    let functions: Vec<String> = sources.flat_map(|source| function_names(&source)).collect();
    let unknown = unknown_tests(&page, &functions);
    assert!(unknown.is_empty(), "{unknown:#?}");
}

/// The test names in all sections that are not names of functions. Not every row names the file of its test.
fn unknown_tests<'a>(page: &'a str, functions: &[String]) -> Vec<&'a str> {
    let rows = page.lines().map(|line| line.split(" | ").collect::<Vec<_>>());
    let cells = rows.filter_map(|cells| match cells[..] {
        [_, _, tests] => Some(tests),
        _ => None,
    });
    let is_unknown = |word: &&str| {
        let name = word.trim_end_matches('…');
        let is_known = |function: &String| function == name || (name != *word && function.starts_with(name));
        is_test_name(name) && !functions.iter().any(is_known)
    };
    cells
        .flat_map(|tests| tests.split([' ', ',', ';', '|']))
        .filter(is_unknown)
        .collect()
}

fn function_names(source: &str) -> Vec<String> {
    let declarations = source.split("fn ").skip(1);
    let name = |rest: &str| {
        rest.split(|c: char| !c.is_ascii_alphanumeric() && c != '_')
            .next()
            .map(str::to_owned)
    };
    declarations.filter_map(name).collect()
}

fn is_test_name(word: &str) -> bool {
    let is_allowed = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
    word.contains('_') && word.chars().all(is_allowed)
}

#[test]
fn tests_named_in_security_md_exist() {
    let page = fs::read_to_string(root().join("docs/explanation/security.md")).expect("the page exists");
    let wrong = wrong_rows(&page, |title| SECTIONS_WITH_TESTS.contains(&title), read_source);
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
fn read_source(file: &str) -> Option<String> {
    let paths = [root().join("tests/tests").join(file), root().join(file)];
    paths.iter().find_map(|path| fs::read_to_string(path).ok())
}

#[test]
fn a_missing_test_is_reported() {
    let read_source = |file: &str| (file == "mesh/a.rs").then(|| "#[test]\nfn one_and_two() {".to_owned());
    let page = "\
## Other
| x | kept | `mesh/b.rs` nothing_here |
## Proxy: a
| Linkerd | tulle | Test |
| x | kept | `mesh/a.rs` one_and…, one_and_two |
| y | kept | `mesh/a.rs` one_and, two_and… |
| z | kept | `mesh/b.rs` one_and_two |
| improved-without-test | improved: a bit | |
| kept-without-test | kept: as it was | |
| no-test-declared | kept | no test |
| not-yet | not yet | |
| claim-without-test | holds | |
";
    assert_eq!(
        wrong_rows(page, |title| title.starts_with("Proxy: "), read_source),
        [
            "y: there is no test one_and",
            "y: there is no test two_and…",
            "z: there is no mesh/b.rs",
            "z: there is no test one_and_two",
            "improved-without-test: name a test, or write 'no test'",
            "kept-without-test: name a test, or write 'no test'",
            "claim-without-test: name a test, or write 'no test'",
        ]
    );
    let functions = function_names("fn nothing_here() {} async fn one_and_two() {}");
    assert_eq!(unknown_tests(page, &functions), ["one_and", "two_and…"]);
}

#[test]
fn links_of_documents_point_to_files_and_headings_that_exist() {
    let mut pages = Vec::new();
    find_files(&root(), "md", &mut pages);
    assert!(pages.len() > 30, "{pages:#?}");
    let wrong: Vec<String> = pages
        .iter()
        .flat_map(|page| {
            let text = fs::read_to_string(page).expect("the page is UTF-8");
            let broken = broken_links(page, &text);
            broken
                .into_iter()
                .map(move |link| format!("{}: {link}", page.display()))
        })
        .collect();
    assert!(wrong.is_empty(), "{wrong:#?}");
}

/// The files with an extension below a directory.
fn find_files(dir: &Path, extension: &str, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(dir).expect("the directory exists") {
        let entry = entry.expect("the directory can be listed");
        let name = entry.file_name();
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            if name != ".git" && name != "target" {
                find_files(&entry.path(), extension, found);
            }
        } else if entry.path().extension().is_some_and(|its| its == extension) {
            found.push(entry.path());
        }
    }
}

/// Relative links of a page whose file or heading does not exist.
fn broken_links(page: &Path, text: &str) -> Vec<String> {
    let is_broken = |link: &&str| {
        let (file, anchor) = link.split_once('#').unwrap_or((*link, ""));
        let path = page.with_file_name(file);
        let has_anchor = |text: &str| anchor.is_empty() || anchors(text).iter().any(|known| known == anchor);
        match file {
            "" => !has_anchor(text),
            _ => !path.exists() || !has_anchor(&fs::read_to_string(path).unwrap_or_default()),
        }
    };
    let prose = without_code_blocks(text);
    let links = prose.split("](").skip(1).filter_map(|rest| rest.split_once(')'));
    links
        .map(|(link, _)| link)
        .filter(|link| !link.contains(':'))
        .filter(is_broken)
        .map(str::to_owned)
        .collect()
}

/// The anchors of the headings of a page, as GitHub derives them.
fn anchors(text: &str) -> Vec<String> {
    let prose = without_code_blocks(text);
    let headings = prose.lines().filter(|line| line.starts_with('#'));
    let anchor = |line: &str| {
        let title = line.trim_start_matches('#').trim().to_lowercase();
        let kept = title.chars().filter(|c| c.is_alphanumeric() || " -_".contains(*c));
        kept.map(|c| if c == ' ' { '-' } else { c }).collect()
    };
    headings.map(anchor).collect()
}

fn without_code_blocks(text: &str) -> String {
    let mut is_code = false;
    let mut prose = Vec::new();
    for line in text.lines() {
        if line.trim_start().starts_with("```") {
            is_code = !is_code;
        } else if !is_code {
            prose.push(line);
        }
    }
    prose.join("\n")
}

#[test]
fn a_broken_link_is_found() {
    let page = root().join("docs/page.md");
    let text = "\
# The `first`, and 2nd_heading
[a](../Cargo.toml) [b](gone.md) [c](#the-first-and-2nd_heading) [d](#gone) [e](https://example.com/gone.md)
[f](../ARCHITECTURE.md#proxy) [g](../ARCHITECTURE.md#gone)
```
[h](gone.md)
# Not a heading
```
[i](#not-a-heading)
";
    assert_eq!(
        broken_links(&page, text),
        ["gone.md", "#gone", "../ARCHITECTURE.md#gone", "#not-a-heading"]
    );
}
