//! The commands in documents exist, with their flags.

use std::fs;
use std::path::{Path, PathBuf};

use clap::CommandFactory as _;
use clap::error::ErrorKind;

use crate::root;

#[test]
fn every_command_of_the_documents_is_accepted() {
    let mut pages = vec![root().join("README.md"), root().join("CONTRIBUTING.md")];
    pages.extend(markdown_files(&root().join("docs")));
    let (mut n_commands, mut refused) = (0, Vec::new());
    for page in pages {
        for line in command_lines(&fs::read_to_string(&page).unwrap()) {
            let Some(program) = line.strip_prefix("tulle ") else {
                continue;
            };
            n_commands += 1;
            let arguments = words(program);
            let parsed = tulle_cli::app::Cli::command()
                .try_get_matches_from(std::iter::once("tulle").chain(arguments.iter().map(String::as_str)));
            if let Err(error) = parsed
                && !matches!(error.kind(), ErrorKind::DisplayHelp | ErrorKind::DisplayVersion)
            {
                refused.push(format!("{}: {line}\n{error}", page.display()));
            }
        }
    }
    assert!(n_commands > 50, "{n_commands}");
    assert!(refused.is_empty(), "{}", refused.join("\n"));
}

/// The commands in the blocks `console` and `sh`, each on one line and without its prompt.
fn command_lines(page: &str) -> Vec<String> {
    let mut found = Vec::new();
    let mut lines = page.lines();
    while let Some(line) = lines.next() {
        if !["```console", "```sh"].contains(&line.trim()) {
            continue;
        }
        let block: Vec<_> = lines.by_ref().take_while(|line| line.trim() != "```").collect();
        let block = block.join("\n").replace("\\\n", " ");
        let commands = block.lines().map(str::trim);
        found.extend(commands.map(|line| line.trim_start_matches("$ ").to_owned()));
    }
    found
}

/// The words of a command up to a comment, pipe or redirection.
fn words(command: &str) -> Vec<String> {
    let mut words = Vec::new();
    let mut word: Option<String> = None;
    let mut quote = None;
    for c in command.chars() {
        match (quote, c) {
            (Some(open), c) if c == open => quote = None,
            (Some(_), c) => word.get_or_insert_default().push(c),
            (None, '\'' | '"') => {
                quote = Some(c);
                word.get_or_insert_default();
            }
            (None, '#' | '|' | '>' | '<' | ';') if word.is_none() => break,
            (None, c) if c.is_whitespace() => words.extend(word.take()),
            (None, c) => word.get_or_insert_default().push(c),
        }
    }
    words.extend(word);
    words.retain(|word| word != "&&" && word != "&");
    words
}

fn markdown_files(dir: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path());
    let (dirs, files): (Vec<_>, Vec<_>) = entries.partition(|path| path.is_dir());
    let pages = files
        .into_iter()
        .filter(|path| path.extension().is_some_and(|end| end == "md"));
    pages.chain(dirs.iter().flat_map(|dir| markdown_files(dir))).collect()
}

#[test]
fn a_command_ends_at_its_comment_pipe_or_redirection() {
    for (line, expected) in [
        (
            "stat deploy/web -n shop   # causes",
            &["stat", "deploy/web", "-n", "shop"][..],
        ),
        (
            "install --set \'a=b c\' | kubectl apply -f -",
            &["install", "--set", "a=b c"],
        ),
        ("explain - <rsp", &["explain", "-"]),
        ("diagnostics policy \"x#y\" 80", &["diagnostics", "policy", "x#y", "80"]),
    ] {
        assert_eq!(words(line), expected);
    }
    let page = "```console\n$ tulle stat \\\n  deploy\n```\n";
    assert_eq!(command_lines(page), ["tulle stat    deploy"]);
}
