//! A worker that fills and reads its pool as a line of its standard input says, until the input ends.
//!
//! ```text
//! SOCKET_PATH SECRET_HEX [BYTES ...]      (memory that it brings, in pieces of so many bytes)
//! write OFFSET LENGTH BYTE     step STEP     read OFFSET LENGTH     (answers the sum of the bytes)
//! ```

use std::error::Error;
use std::io::{self, BufRead};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use kvgrpc_rank::{Rank, Ticket};

fn main() -> Result<(), Box<dyn Error>> {
    let mut lines = io::stdin().lock().lines();
    let first = lines.next().ok_or("a line with the ticket is missing")??;
    let [path, secret, pieces @ ..] = &*first.split(' ').collect::<Vec<_>>() else {
        return Err("the ticket is SOCKET_PATH SECRET_HEX".into());
    };
    let sizes = pieces.iter().map(|size| size.parse()).collect::<Result<Vec<usize>, _>>()?;
    let memory_bytes = sizes.iter().sum::<usize>() as u64;
    let ticket =
        Ticket { socket_path: (*path).into(), secret: unhex(secret)?, comes_back: Duration::ZERO, memory_bytes };
    let rank = Arc::new(if sizes.is_empty() {
        Rank::attach(&ticket, 0)?
    } else {
        Rank::attach_memory(&ticket, 0, sizes.into_iter().map(|size| vec![0; size].into()).collect())?
    });
    let serving = thread::spawn({
        let rank = Arc::clone(&rank);
        move || rank.serve()
    });
    println!("attached {}", rank.segments().iter().map(|segment| segment.len()).sum::<usize>());
    for line in lines {
        let line = line?;
        let words: Vec<&str> = line.split(' ').collect();
        let numbers = words[1..].iter().map(|word| word.parse()).collect::<Result<Vec<usize>, _>>()?;
        match (words[0], numbers.as_slice()) {
            ("write", &[offset, length, byte]) => {
                rank.write(offset, &vec![u8::try_from(byte)?; length]);
                println!("written");
            }
            ("read", &[offset, length]) => {
                let mut bytes = vec![0; length];
                rank.read(offset, &mut bytes);
                println!("{}", bytes.into_iter().map(u64::from).sum::<u64>());
            }
            ("step", &[step]) => {
                rank.step_done(step as u64)?;
                println!("reported");
            }
            _ => return Err(format!("no such line: {line}").into()),
        }
    }
    rank.stop();
    serving.join().expect("it does not panic")?;
    Ok(())
}

fn unhex(text: &str) -> Result<Vec<u8>, Box<dyn Error>> {
    let digits = text.as_bytes().chunks(2);
    digits.map(|pair| Ok(u8::from_str_radix(std::str::from_utf8(pair)?, 16)?)).collect()
}
